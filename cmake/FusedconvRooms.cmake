# A room is an object library and the files that bind it. Libraries know nothing of Python, so
# modules for several Python versions share their objects.

# fusedconv_add_room(NAME <name> SOURCES <file>... BINDING <file>...
#                    [ARCHITECTURES <architecture>...])
# builds fusedconv_<name>, for all listed architectures unless given, and adds it to the module.
function(fusedconv_add_room)
  cmake_parse_arguments(PARSE_ARGV 0 room "" "NAME" "SOURCES;BINDING;ARCHITECTURES")
  set(library fusedconv_${room_NAME})
  add_library(${library} OBJECT ${room_SOURCES})
  target_link_libraries(
    ${library}
    PUBLIC fusedconv_cuda_headers
    PRIVATE fusedconv_common fusedconv_device_code)
  set_target_properties(${library} PROPERTIES JOB_POOL_COMPILE fusedconv_nvcc)
  if(room_ARCHITECTURES)
    set_target_properties(${library} PROPERTIES CUDA_ARCHITECTURES "${room_ARCHITECTURES}")
  endif()
  target_sources(_C PRIVATE ${room_BINDING})
  target_link_libraries(_C PRIVATE ${library})
endfunction()

# As fusedconv_add_room(), for the convolutions of one family of architectures. With ARCHITECTURES,
# it is built for those of them that FUSEDCONV_CUDA_ARCHITECTURES lists, and not at all where it
# lists none. The global property fusedconv_families names what is built, and the module's sources
# see FUSEDCONV_WITH_<NAME>.
function(fusedconv_add_family)
  cmake_parse_arguments(PARSE_ARGV 0 family "" "NAME" "SOURCES;BINDING;ARCHITECTURES")
  set(architectures "")
  foreach(architecture IN LISTS family_ARCHITECTURES)
    if(architecture IN_LIST FUSEDCONV_CUDA_ARCHITECTURES)
      fusedconv_cuda_architecture(${architecture} code)
      list(APPEND architectures ${code})
    endif()
  endforeach()
  if(family_ARCHITECTURES AND NOT architectures)
    message(STATUS "Family ${family_NAME} is not built: FUSEDCONV_CUDA_ARCHITECTURES "
                   "(${FUSEDCONV_CUDA_ARCHITECTURES}) lists none of ${family_ARCHITECTURES}")
    return()
  endif()
  fusedconv_add_room(
    NAME ${family_NAME}
    SOURCES ${family_SOURCES}
    BINDING ${family_BINDING}
    ARCHITECTURES ${architectures})
  target_link_libraries(fusedconv_${family_NAME} PRIVATE Cutlass::Cutlass)
  string(TOUPPER ${family_NAME} upper)
  target_compile_definitions(_C PRIVATE FUSEDCONV_WITH_${upper}=1)
  set_property(GLOBAL APPEND PROPERTY fusedconv_families ${family_NAME})
endfunction()

# fusedconv_add_instruction_sets(SOURCES <file>...) compiles the inner loops of the processor's
# kernels once for each instruction set and adds them to the module, which picks one when it is
# loaded. Always optimised: the loops may call nothing that another instruction set compiled too.
function(fusedconv_add_instruction_sets)
  cmake_parse_arguments(PARSE_ARGV 0 loops "" "" "SOURCES")
  set(flags_baseline "")
  set(names baseline)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    set(flags_avx2 -mavx2 -mfma -mf16c)
    set(flags_avx512 ${flags_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
    set(flags_avx512_bf16 ${flags_avx512} -mavx512bf16)
    list(APPEND names avx2 avx512 avx512_bf16)
    target_compile_definitions(_C PRIVATE FUSEDCONV_X86=1)
  endif()
  foreach(name IN LISTS names)
    set(library fusedconv_cpu_${name})
    add_library(${library} OBJECT ${loops_SOURCES})
    target_link_libraries(${library} PRIVATE fusedconv_common)
    target_compile_options(${library} PRIVATE -O3 ${flags_${name}})
    target_compile_definitions(${library} PRIVATE FUSEDCONV_INSTRUCTION_SET=${name})
    target_link_libraries(_C PRIVATE ${library})
  endforeach()
endfunction()
