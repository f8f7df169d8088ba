# SPDX-License-Identifier: Apache-2.0
# cmake -DBUILD=… -DSOURCE=… -DWORK=… -DCXX=… [-DCXX_FLAGS=…] -P install.cmake
# Installs a finished build into an empty prefix, then configures, builds and runs the program beside this file with
# nothing but that prefix. The build itself is not touched.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message(NOTICE "${output}")
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "status ${status}: ${command}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
set(prefix ${WORK}/prefix)
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})

# Moved afterwards: a package that works only where it was installed is not relocatable.
file(RENAME ${prefix} ${WORK}/moved)
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${WORK}/moved
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_FLAGS=${CXX_FLAGS})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer ${SOURCE}/../../data/collapsed-layer.safetensors)
if(EXISTS ${WORK}/moved/bin/faultline)
  run(${WORK}/moved/bin/faultline formats)
  run(${WORK}/moved/bin/faultline plans)
endif()

# What was installed must not lead back to the tree or the build.
file(GLOB_RECURSE texts ${WORK}/moved/*.cmake ${WORK}/moved/*.hpp ${WORK}/moved/*.cuh)
foreach(text IN LISTS texts)
  file(READ ${text} content)
  string(FIND "${content}" "${BUILD}" at)
  if(NOT at EQUAL -1)
    message(FATAL_ERROR "${text} names the build folder ${BUILD}")
  endif()
endforeach()
