# The rdma transport is built where libibverbs' headers are. CLOVER_VERBS: AUTO (default), ON (an
# error where they are missing) or OFF. It is a module of its own, so that the package loads where
# the library is not installed.
set(CLOVER_VERBS AUTO CACHE STRING "Build the rdma transport: AUTO, ON or OFF")
set(clover_verbs FALSE)

if(CLOVER_VERBS)
  find_path(CLOVER_VERBS_INCLUDE infiniband/verbs.h)
  find_library(CLOVER_VERBS_LIBRARY ibverbs)
  if(CLOVER_VERBS_INCLUDE AND CLOVER_VERBS_LIBRARY)
    set(clover_verbs TRUE)
  elseif(NOT CLOVER_VERBS STREQUAL "AUTO")
    message(FATAL_ERROR "CLOVER_VERBS is ON, but there are no headers of libibverbs: install "
      "libibverbs-dev (Debian) or rdma-core-devel, or leave CLOVER_VERBS out to build without rdma")
  endif()
endif()

if(clover_verbs)
  message(STATUS "rdma transport: built with ${CLOVER_VERBS_LIBRARY}")
else()
  message(STATUS "rdma transport: none (no headers of libibverbs)")
endif()
