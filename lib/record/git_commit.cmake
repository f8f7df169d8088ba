# SPDX-License-Identifier: Apache-2.0
# Run at every build: writes OUTPUT, a header that names the commit of SOURCE, and leaves it alone when nothing changed.
# A release tarball, or a machine without git, gives "unknown".
set(commit "unknown")
find_program(git git)
if(git)
  execute_process(COMMAND ${git} -C ${SOURCE} rev-parse --show-toplevel OUTPUT_VARIABLE top RESULT_VARIABLE failed
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  # An unpacked tarball inside somebody else's repository has no commit of its own.
  file(REAL_PATH ${SOURCE} source)
  if(NOT failed AND top STREQUAL source)
    execute_process(COMMAND ${git} -C ${SOURCE} rev-parse HEAD OUTPUT_VARIABLE head RESULT_VARIABLE failed
                    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(NOT failed)
      set(commit ${head})
      execute_process(COMMAND ${git} -C ${SOURCE} diff-index --quiet HEAD -- RESULT_VARIABLE dirty ERROR_QUIET)
      if(dirty)
        string(APPEND commit "-dirty")
      endif()
    endif()
  endif()
endif()
set(text "// SPDX-License-Identifier: Apache-2.0
#pragma once
namespace faultline::detail {
inline constexpr const char* git_commit = \"${commit}\";
}  // namespace faultline::detail
")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT "${old}" STREQUAL "${text}")
  file(WRITE ${OUTPUT} "${text}")
endif()
