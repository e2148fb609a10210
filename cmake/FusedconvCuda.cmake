# Finds nvcc, enables CUDA and defines
#   FUSEDCONV_WITH_CUDA     whether CUDA kernels are built
#   fusedconv_cuda_headers  the runtime's headers
#   fusedconv_device_code   flags for device code

set(nvcc_oldest 12.1)  # the first whose kernels take more than 4 KB of parameters
set(nvcc_packages
    "nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cuda-crt nvidia-nvvm")

# Sets the variable to the path where it is an nvcc of sufficient version, and clears it if not.
function(fusedconv_check_nvcc variable)
  execute_process(
    COMMAND ${${variable}} --version
    OUTPUT_VARIABLE text
    ERROR_QUIET)
  string(REGEX MATCH "release ([0-9.]+)" unused "${text}")
  if("${CMAKE_MATCH_1}" STREQUAL "" OR "${CMAKE_MATCH_1}" VERSION_LESS nvcc_oldest)
    message(STATUS "${${variable}}: version '${CMAKE_MATCH_1}' is below ${nvcc_oldest}; not used")
    set(${variable} "" PARENT_SCOPE)
  endif()
endfunction()

# The caller's choice, the system's, the Python packages' (CUDA 13 puts them under one root).
function(fusedconv_find_nvcc)
  if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
    set(fusedconv_nvcc "${CMAKE_CUDA_COMPILER}" PARENT_SCOPE)
    set(fusedconv_nvcc_found TRUE PARENT_SCOPE)
    return()
  endif()
  set(nvcc "")
  if(NOT FUSEDCONV_IGNORE_SYSTEM_NVCC)
    find_program(
      nvcc_program nvcc
      HINTS ENV CUDA_HOME ENV CUDA_PATH
      PATHS /usr/local/cuda /opt/cuda
      PATH_SUFFIXES bin
      NO_CACHE)
    if(nvcc_program)
      set(nvcc ${nvcc_program})
      fusedconv_check_nvcc(nvcc)
    endif()
  endif()
  if(NOT nvcc)
    # The site-packages folder counts too: an isolated build leaves it out of sys.path.
    fusedconv_ask_python(
      nvcc
      "import pathlib, sys, sysconfig
for folder in [*sys.path, *map(sysconfig.get_path, ('purelib', 'platlib'))]:
    nvcc = pathlib.Path(folder, 'nvidia/cu13/bin/nvcc')
    if nvcc.is_file():
        print(nvcc)
        break")
    if(nvcc)
      cmake_path(GET nvcc PARENT_PATH root)
      cmake_path(GET root PARENT_PATH root)
      foreach(part IN ITEMS include/cuda_runtime.h include/crt/host_defines.h include/cccl
                            lib/libcudart_static.a nvvm/bin/cicc)
        if(NOT EXISTS ${root}/${part})
          message(STATUS "${nvcc}: ${root}/${part} is missing; not used")
          set(nvcc "")
          break()
        endif()
      endforeach()
    endif()
  endif()
  set(fusedconv_nvcc "${nvcc}" PARENT_SCOPE)
  if(nvcc)
    set(fusedconv_nvcc_found TRUE PARENT_SCOPE)
  endif()
endfunction()

# Sets the variable to CMake's form of an architecture: PTX of one with a letter runs nowhere else.
function(fusedconv_cuda_architecture architecture variable)
  if(architecture MATCHES "^[0-9]+[af]$")
    string(APPEND architecture -real)
  endif()
  set(${variable} ${architecture} PARENT_SCOPE)
endfunction()

set(FUSEDCONV_WITH_CUDA FALSE)
if(NOT FUSEDCONV_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "FUSEDCONV_CUDA is '${FUSEDCONV_CUDA}' (expected AUTO, ON or OFF)")
endif()
if(FUSEDCONV_CUDA STREQUAL "OFF")
  return()
endif()

fusedconv_find_nvcc()
if(NOT fusedconv_nvcc_found)
  set(remedy
      "nvcc was not found on PATH, in CUDA_HOME, in /usr/local/cuda or among the packages of\n"
      "${fusedconv_build_python}.\n"
      "To compile the CUDA kernels, install the CUDA toolkit (13.0), or its Python packages:\n"
      "  ${fusedconv_build_python} -m pip install ")
  string(REGEX REPLACE "([^ ]+)" "\"\\1==13.0.*\"" packages "${nvcc_packages}")
  list(APPEND remedy "${packages}\n" "and build again.")
  if(FUSEDCONV_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FUSEDCONV_CUDA is ON, but " ${remedy})
  endif()
  message(WARNING "Building CPU kernels only: " ${remedy})
  return()
endif()
if(fusedconv_nvcc)
  set(CMAKE_CUDA_COMPILER ${fusedconv_nvcc})
endif()

set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_ARCHITECTURES "")
foreach(architecture IN LISTS FUSEDCONV_CUDA_ARCHITECTURES)
  fusedconv_cuda_architecture(${architecture} code)
  list(APPEND CMAKE_CUDA_ARCHITECTURES ${code})
endforeach()

# The packages keep libraries in lib; their nvcc looks in lib64 when it links CMake's test programs.
set(fusedconv_cuda_package_root "")
if("${CMAKE_CUDA_COMPILER}$ENV{CUDACXX}" MATCHES "^(.*/nvidia/cu13)/bin/nvcc")
  set(fusedconv_cuda_package_root ${CMAKE_MATCH_1})
  set(fusedconv_library_path "$ENV{LIBRARY_PATH}")
  set(ENV{LIBRARY_PATH} "${fusedconv_cuda_package_root}/lib:$ENV{LIBRARY_PATH}")
endif()
enable_language(CUDA)
# Machine code for several architectures, a sixth of the size.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  string(APPEND CMAKE_CUDA_FLAGS " --compress-mode=size")
endif()
if(fusedconv_cuda_package_root)
  set(ENV{LIBRARY_PATH} "${fusedconv_library_path}")
endif()
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS nvcc_oldest)
  message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} is version ${CMAKE_CUDA_COMPILER_VERSION}; "
                      "${nvcc_oldest} is the oldest that serves")
endif()
set(FUSEDCONV_WITH_CUDA TRUE)

# Not find_package(CUDAToolkit): it insists on a shared runtime, which the Python packages lack.
# CMake itself links the static runtime where a target has CUDA sources.
add_library(fusedconv_cuda_headers INTERFACE)
target_include_directories(fusedconv_cuda_headers SYSTEM
                           INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
foreach(folder IN LISTS CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES)
  if(EXISTS ${folder}/cccl)
    target_include_directories(fusedconv_cuda_headers SYSTEM INTERFACE ${folder}/cccl)
  endif()
endforeach()

add_library(fusedconv_device_code INTERFACE)
target_compile_features(fusedconv_device_code INTERFACE cuda_std_20)
target_compile_options(
  fusedconv_device_code
  INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>
            $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${FUSEDCONV_LINEINFO}>>:-lineinfo>
            $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${FUSEDCONV_PTXAS_VERBOSE}>>:-Xptxas=-v>)
