# SPDX-License-Identifier: Apache-2.0
# The installed CMake package: find_package(faultline) gives the targets faultline::format, faultline::truth, … under the
# names that the tree itself uses. Targets, headers and programs are installed where they are declared
# (FaultlineModule.cmake); here is what makes a package of them. tests/project/install builds a program against it.
include(CMakePackageConfigHelpers)

# What the package's user must find before our targets, for each foreign target that one of ours links. A library of ours
# that links something else stops the configuration below, so the package cannot forget it.
set(FAULTLINE_FINDS
  "Threads::Threads|find_dependency(Threads)"
  "fmt::|find_dependency(fmt)"
  "Eigen3::Eigen|find_dependency(Eigen3 3.3 NO_MODULE)"
  "nlohmann_json::nlohmann_json|find_dependency(nlohmann_json)"
  "tomlplusplus::tomlplusplus|find_dependency(tomlplusplus)"
  "CLI11::CLI11|find_dependency(CLI11)"
  "PkgConfig::MPFR|faultline_find_with_pkg_config(MPFR mpfr)"
  "hdf5::hdf5|faultline_find_hdf5()"
  "HDF5::HDF5|faultline_find_hdf5()"
  "ZLIB::ZLIB|find_dependency(ZLIB)"
  "CUDA::|find_dependency(CUDAToolkit)")

# The libraries that the folders below `directory` declared.
function(faultline_collect_libraries directory result)
  get_property(targets DIRECTORY ${directory} PROPERTY BUILDSYSTEM_TARGETS)
  list(FILTER targets INCLUDE REGEX "^faultline_")
  foreach(target IN LISTS targets)
    get_target_property(type ${target} TYPE)
    get_target_property(name ${target} EXPORT_NAME)
    if(name AND type MATCHES "LIBRARY")
      list(APPEND ${result} ${target})
    endif()
  endforeach()
  get_property(folders DIRECTORY ${directory} PROPERTY SUBDIRECTORIES)
  foreach(folder IN LISTS folders)
    faultline_collect_libraries(${folder} ${result})
  endforeach()
  set(${result} ${${result}} PARENT_SCOPE)
endfunction()

set(libraries "")
set(finds "")
set(FAULTLINE_LIBRARIES "")
faultline_collect_libraries(${PROJECT_SOURCE_DIR} libraries)
foreach(library IN LISTS libraries)
  get_target_property(name ${library} EXPORT_NAME)
  list(APPEND FAULTLINE_LIBRARIES ${name})
  get_target_property(links ${library} INTERFACE_LINK_LIBRARIES)
  string(REGEX MATCHALL "[A-Za-z0-9_]+::[A-Za-z0-9_-]+" links "${links}")
  list(FILTER links EXCLUDE REGEX "^faultline::|^::")
  foreach(link IN LISTS links)
    set(known NO)
    foreach(row IN LISTS FAULTLINE_FINDS)
      string(REGEX MATCH "^([^|]+)[|](.*)$" row "${row}")
      string(FIND "${link}" "${CMAKE_MATCH_1}" at)
      if(at EQUAL 0)
        list(APPEND finds "${CMAKE_MATCH_2}")
        set(known YES)
      endif()
    endforeach()
    if(NOT known)
      message(FATAL_ERROR "${library} links ${link}: say in cmake/Package.cmake how the package's user finds it")
    endif()
  endforeach()
endforeach()
list(REMOVE_DUPLICATES finds)
list(JOIN finds "\n" FAULTLINE_FIND_DEPENDENCIES)

set(FAULTLINE_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/faultline)
install(EXPORT faultlineTargets NAMESPACE faultline:: DESTINATION ${FAULTLINE_CMAKE_DIR})
configure_package_config_file(cmake/faultlineConfig.cmake.in ${PROJECT_BINARY_DIR}/faultlineConfig.cmake
                              INSTALL_DESTINATION ${FAULTLINE_CMAKE_DIR})
# Before 1.0 a minor version may change what a header says.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/faultlineConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/faultlineConfig.cmake ${PROJECT_BINARY_DIR}/faultlineConfigVersion.cmake
        DESTINATION ${FAULTLINE_CMAKE_DIR})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
