# SPDX-License-Identifier: Apache-2.0
# CUDA as the device back ends have it. A folder with device code calls the macro, since a language is enabled by folder.

macro(faultline_use_cuda)
  enable_language(CUDA)
  # CMake 3.25 does not know that nvcc has had this dialect since 12.0.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  find_package(CUDAToolkit REQUIRED)
endmacro()

# faultline_device_code(target [ROUNDS_LIKE_HOST] [architectures]): architectures as CUDA_ARCHITECTURES has them; the
# preset's where none are given. ROUNDS_LIKE_HOST: a product and a sum stay two roundings, as with -ffp-contract=off there;
# where one is meant it is written as an fma.
function(faultline_device_code target)
  cmake_parse_arguments(arg "ROUNDS_LIKE_HOST" "" "" ${ARGN})
  set_target_properties(${target} PROPERTIES CUDA_STANDARD 20)
  if(arg_UNPARSED_ARGUMENTS)
    set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(arg_ROUNDS_LIKE_HOST)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;-Xcompiler=-ffp-contract=off>)
  endif()
endfunction()
