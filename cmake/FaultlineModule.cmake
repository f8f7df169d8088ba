# SPDX-License-Identifier: Apache-2.0
# How a folder of the tree becomes a library, a test, a benchmark.
#
# Headers stand beside their sources and are included as <faultline/FOLDER/name.hpp>, in the tree and after installation
# alike: lib/format/format.hpp is <faultline/format/format.hpp>. In the tree a link farm in the build folder does it.

set(FAULTLINE_INCLUDE_DIR ${PROJECT_BINARY_DIR}/include)
file(MAKE_DIRECTORY ${FAULTLINE_INCLUDE_DIR}/faultline)

# faultline_headers(): the current folder becomes <faultline/NAME/...>, and its headers are installed there.
function(faultline_headers)
  get_filename_component(name ${CMAKE_CURRENT_SOURCE_DIR} NAME)
  file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR} ${FAULTLINE_INCLUDE_DIR}/faultline/${name} SYMBOLIC)
  install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/faultline/${name}
          FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
endfunction()

# faultline_library(NAME SOURCES a.cpp … DEPENDS faultline::format …): target faultline_NAME, alias faultline::NAME.
# With no SOURCES it is a header-only library.
function(faultline_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  faultline_headers()
  set(target faultline_${name})
  if(ARG_SOURCES)
    add_library(${target} STATIC ${ARG_SOURCES})
    set(scope PUBLIC)
    target_link_libraries(${target} PRIVATE faultline_flags)
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(faultline::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  target_compile_features(${target} ${scope} cxx_std_20)
  target_include_directories(${target} ${scope} $<BUILD_INTERFACE:${FAULTLINE_INCLUDE_DIR}>
                             $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(${target} ${scope} ${ARG_DEPENDS})
  if(ARG_PRIVATE_DEPENDS)
    target_link_libraries(${target} PRIVATE ${ARG_PRIVATE_DEPENDS})
  endif()
  install(TARGETS ${target} EXPORT faultlineTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
endfunction()

# faultline_test(NAME SOURCES a_test.cpp … DEPENDS faultline::format …): one GoogleTest program, target NAME_test,
# every TEST in it a CTest entry.
function(faultline_test name)
  if(NOT FAULTLINE_BUILD_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name}_test ${ARG_SOURCES})
  target_link_libraries(${name}_test PRIVATE ${ARG_DEPENDS} faultline_flags GTest::gmock GTest::gtest_main)
  if(NOT TARGET faultline_test_paths)
    add_library(faultline_test_paths STATIC ${PROJECT_SOURCE_DIR}/tests/paths.cpp)
    target_compile_features(faultline_test_paths PRIVATE cxx_std_20)
    target_compile_definitions(faultline_test_paths PRIVATE FAULTLINE_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                               FAULTLINE_PROGRAM="$<TARGET_FILE:faultline>")
    target_include_directories(faultline_test_paths INTERFACE ${PROJECT_SOURCE_DIR}/tests)
  endif()
  target_link_libraries(${name}_test PRIVATE faultline_test_paths)
  set(environment)
  if(FAULTLINE_SANITIZE)
    set(environment ENVIRONMENT "LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/cmake/leaks.supp:print_suppressions=0")
  endif()
  gtest_discover_tests(${name}_test TEST_PREFIX "${name}." DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 900 ${environment})
endfunction()

# faultline_benchmark(NAME SOURCES … DEPENDS …): one Google Benchmark program, target NAME_bench. Never run by the tests.
function(faultline_benchmark name)
  if(NOT FAULTLINE_BUILD_BENCHMARKS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name}_bench ${ARG_SOURCES})
  target_link_libraries(${name}_bench PRIVATE ${ARG_DEPENDS} faultline_flags benchmark::benchmark)
endfunction()
