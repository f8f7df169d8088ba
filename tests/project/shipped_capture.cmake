# SPDX-License-Identifier: Apache-2.0
# cmake -DSOURCE=… -DWORK=… -DPYTHON=… -P shipped_capture.cmake: cuts tests/data/collapsed-layer.safetensors again and
# compares. The whole captures are looked for in FAULTLINE_CAPTURES, else beside the source tree.
set(captures $ENV{FAULTLINE_CAPTURES})
if(NOT captures)
  set(captures ${SOURCE}/../shared/captures)
endif()
set(whole ${captures}/biased128-600.safetensors)
if(NOT EXISTS ${whole})
  message("SKIPPED: ${whole} is not there")
  return()
endif()
set(again ${WORK}/collapsed-layer.safetensors)
execute_process(COMMAND ${PYTHON} ${SOURCE}/tests/data/cut_capture.py ${whole} ${again}
                        --layer layer1 --heads 0 --kernels flash,math COMMAND_ERROR_IS_FATAL ANY)
file(SHA256 ${again} expected)
file(SHA256 ${SOURCE}/tests/data/collapsed-layer.safetensors actual)
if(NOT actual STREQUAL expected)
  message(FATAL_ERROR "tests/data/collapsed-layer.safetensors: SHA-256 ${actual}, cut again ${expected}")
endif()
