# The interpreter that the module is built for (Python_EXECUTABLE), the one whose packages the build
# uses (fusedconv_build_python), and pybind11.

# A build folder may change interpreters, and then keeps the kernels' objects; what FindPython and
# pybind11 remember of the previous one has to go.
if(DEFINED CACHE{fusedconv_last_python} AND NOT fusedconv_last_python STREQUAL FUSEDCONV_PYTHON)
  get_cmake_property(cached CACHE_VARIABLES)
  list(FILTER cached INCLUDE REGEX "^_?(Python|PYTHON|PYBIND11_PYTHON)_")
  foreach(variable IN LISTS cached)
    unset(${variable} CACHE)
  endforeach()
endif()
set(fusedconv_last_python "${FUSEDCONV_PYTHON}" CACHE INTERNAL "")
if(FUSEDCONV_PYTHON)
  set(Python_EXECUTABLE ${FUSEDCONV_PYTHON})
endif()
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

set(fusedconv_build_python ${Python_EXECUTABLE})
if(FUSEDCONV_BUILD_PYTHON)
  set(fusedconv_build_python ${FUSEDCONV_BUILD_PYTHON})
endif()

# Runs a program of the build interpreter; what it prints goes to the variable, nothing on failure.
function(fusedconv_ask_python variable program)
  execute_process(
    COMMAND ${fusedconv_build_python} -c "${program}"
    OUTPUT_VARIABLE answer
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(${variable} "${answer}" PARENT_SCOPE)
endfunction()

fusedconv_ask_python(pybind11_folder "import pybind11; print(pybind11.get_cmake_dir())")
find_package(pybind11 3.0 CONFIG QUIET HINTS "${pybind11_folder}")
if(NOT pybind11_FOUND)
  message(
    FATAL_ERROR
      "pybind11 >= 3.0 was not found. Install it for ${fusedconv_build_python}:\n"
      "  ${fusedconv_build_python} -m pip install \"pybind11>=3.0\"\n"
      "or name an interpreter that has it (-DFUSEDCONV_BUILD_PYTHON=...), or its CMake folder "
      "(-Dpybind11_DIR=...).")
endif()
