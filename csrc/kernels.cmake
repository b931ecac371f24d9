# Kernels are one source, compiled once per instruction set; a dispatcher chooses at run time.
# Only those objects get the instruction set's flags, so nothing else can need more than the baseline.
include(CheckCXXCompilerFlag)

set(clover_isas portable)
set(clover_flags_portable "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64|i[3-6]86)$")
  set(clover_flags_avx2 -mavx2 -mfma -mf16c)
  set(clover_flags_avx512 ${clover_flags_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  set(clover_flags_avx512bf16 ${clover_flags_avx512} -mavx512bf16 -mavx512vnni)
  set(clover_flags_amx ${clover_flags_avx512bf16} -mamx-tile -mamx-bf16)
  foreach(isa avx2 avx512 avx512bf16 amx)
    string(TOUPPER ${isa} upper)
    list(JOIN clover_flags_${isa} " " flags)
    check_cxx_compiler_flag("${flags}" CLOVER_COMPILES_${upper})
    if(CLOVER_COMPILES_${upper})
      list(APPEND clover_isas ${isa})
    endif()
  endforeach()
endif()

# Adds `sources` of this folder to `library`, once for each of the named instruction sets that the
# compiler knows; the library's own files see CLOVER_HAVE_<NAME>.
function(clover_add_kernels library sources)
  foreach(isa IN LISTS ARGN)
    if(NOT isa IN_LIST clover_isas)
      continue()
    endif()
    add_library(${library}_${isa} OBJECT ${sources})
    target_include_directories(${library}_${isa} PRIVATE ${CMAKE_SOURCE_DIR}/csrc)
    target_compile_definitions(${library}_${isa} PRIVATE CLOVER_ISA=${isa})
    # ISO mode turns contraction of a * b + c into one fused operation off; the kernels want it.
    target_compile_options(${library}_${isa}
      PRIVATE -O3 -ffp-contract=fast ${clover_flags_${isa}})
    target_sources(${library} PRIVATE $<TARGET_OBJECTS:${library}_${isa}>)
    string(TOUPPER ${isa} upper)
    target_compile_definitions(${library} PRIVATE CLOVER_HAVE_${upper})
  endforeach()
endfunction()
