# CUDA is built where nvcc 12 or newer is found. CLOVER_CUDA: AUTO (default), ON (an error where it is
# missing) or OFF.
set(CLOVER_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO, ON or OFF")
set(clover_cuda FALSE)

if(CLOVER_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # Machine code for 8.0, which 8.6 and 8.9 run too, and for what is tuned; PTX that newer devices
    # compile when they load it. -DCMAKE_CUDA_ARCHITECTURES=89 builds for one device's own.
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 90-virtual)
    endif()
    # No library of CUDA's is needed to load the module, so it loads where there is no GPU.
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12)
      set(clover_cuda TRUE)
    endif()
  endif()
  if(NOT clover_cuda AND NOT CLOVER_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "CLOVER_CUDA is ON, but there is no nvcc of CUDA 12 or newer: put it on "
      "the PATH or set CUDACXX, or leave CLOVER_CUDA out to build for the CPU only")
  endif()
endif()

if(clover_cuda)
  message(STATUS "CUDA kernels: built with nvcc ${CUDAToolkit_VERSION}")
else()
  message(STATUS "CUDA kernels: none (no nvcc of CUDA 12 or newer); this build runs on the CPU only")
endif()

# What libraries of kernels share.
function(clover_cuda_library library)
  target_include_directories(${library} PUBLIC ${CMAKE_SOURCE_DIR}/csrc)
  target_link_libraries(${library} PUBLIC CUDA::cudart_static)
  if(CLOVER_WERROR)
    target_compile_options(${library} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  endif()
endfunction()
