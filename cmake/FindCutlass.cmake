# CUTLASS headers as Cutlass::Cutlass: FUSEDCONV_CUTLASS_DIR where given, else the Python package
# nvidia-cutlass of the build interpreter. Sets Cutlass_VERSION and Cutlass_INCLUDE_DIR.

set(cutlass_wanted 4.2)
set(cutlass_remedy
    "Install the headers for ${fusedconv_build_python}:\n"
    "  ${fusedconv_build_python} -m pip install --no-deps nvidia-cutlass==4.2.0.0\n"
    "or name a CUTLASS ${cutlass_wanted} checkout (-DFUSEDCONV_CUTLASS_DIR=...).")

# The cache entry of an earlier run may lie in a build environment that is gone.
unset(Cutlass_INCLUDE_DIR CACHE)
if(FUSEDCONV_CUTLASS_DIR)
  set(cutlass_roots ${FUSEDCONV_CUTLASS_DIR} ${FUSEDCONV_CUTLASS_DIR}/include)
else()
  fusedconv_ask_python(
    cutlass_package
    "import importlib.util as u; print(*u.find_spec('cutlass_library').submodule_search_locations)")
  set(cutlass_roots ${cutlass_package}/source/include)
endif()
find_path(Cutlass_INCLUDE_DIR cutlass/cutlass.h PATHS ${cutlass_roots} NO_DEFAULT_PATH)

if(NOT Cutlass_INCLUDE_DIR)
  set(cutlass_place "FUSEDCONV_CUTLASS_DIR (${FUSEDCONV_CUTLASS_DIR})")
  if(NOT FUSEDCONV_CUTLASS_DIR)
    set(cutlass_place "the packages of ${fusedconv_build_python}")
  endif()
  message(FATAL_ERROR "cutlass/cutlass.h was not found in ${cutlass_place}. " ${cutlass_remedy})
endif()

set(Cutlass_VERSION "")
foreach(part IN ITEMS MAJOR MINOR PATCH)
  file(STRINGS ${Cutlass_INCLUDE_DIR}/cutlass/version.h line REGEX "#define CUTLASS_${part} ")
  string(REGEX MATCH "[0-9]+" number "${line}")
  list(APPEND Cutlass_VERSION "${number}")
endforeach()
list(JOIN Cutlass_VERSION "." Cutlass_VERSION)
if(NOT Cutlass_VERSION MATCHES "^${cutlass_wanted}\\.")
  message(FATAL_ERROR "CUTLASS at ${Cutlass_INCLUDE_DIR} is version ${Cutlass_VERSION}; "
                      "${cutlass_wanted} is needed. " ${cutlass_remedy})
endif()

cmake_path(GET Cutlass_INCLUDE_DIR PARENT_PATH cutlass_root)
add_library(Cutlass::Cutlass INTERFACE IMPORTED)
set_target_properties(
  Cutlass::Cutlass PROPERTIES INTERFACE_INCLUDE_DIRECTORIES
                              "${Cutlass_INCLUDE_DIR};${cutlass_root}/tools/util/include")
set(Cutlass_FOUND TRUE)
