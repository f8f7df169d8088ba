# SPDX-License-Identifier: Apache-2.0
# Targets that look at the sources: `format` rewrites their layout, `format-check` fails where that would change
# something, `tidy` prints what clang-tidy finds. None is part of `all`.
if(NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()
find_program(FAULTLINE_CLANG_FORMAT clang-format)
if(FAULTLINE_CLANG_FORMAT)
  add_custom_target(format COMMAND ${PROJECT_SOURCE_DIR}/cmake/format --fix VERBATIM)
  add_custom_target(format-check COMMAND ${PROJECT_SOURCE_DIR}/cmake/format --check VERBATIM)
endif()
find_program(FAULTLINE_RUN_CLANG_TIDY run-clang-tidy)
if(FAULTLINE_RUN_CLANG_TIDY)
  # On what the compiler is given in this build folder. Unknown options are GCC's own.
  add_custom_target(tidy
    COMMAND ${FAULTLINE_RUN_CLANG_TIDY} -quiet -p ${PROJECT_BINARY_DIR} -extra-arg=-Wno-unknown-warning-option
            -extra-arg=-Wno-ignored-optimization-argument
            "^${PROJECT_SOURCE_DIR}/(lib|kernels|injectors|probes|experiments|tests)/.*[.]cpp$"
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} USES_TERMINAL VERBATIM)
endif()
