# What tells builds of one version apart whose kernels differ: tuned choices and records of times
# hold for one of them.

# fusedconv_hash_sources(OUT folder): the start of a SHA-256 of the folder's sources, in the order
# of their paths. Where one changes, CMake runs again.
function(fusedconv_hash_sources out folder)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS LIST_DIRECTORIES false
       RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} ${folder}/*.hpp ${folder}/*.cpp ${folder}/*.cu)
  list(SORT sources)
  set(digests "")
  foreach(source IN LISTS sources)
    file(SHA256 ${CMAKE_CURRENT_SOURCE_DIR}/${source} digest)
    string(APPEND digests "${source} ${digest}\n")
  endforeach()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${sources})
  string(SHA256 digest "${digests}")
  string(SUBSTRING ${digest} 0 12 digest)
  set(${out} ${digest} PARENT_SCOPE)
endfunction()
