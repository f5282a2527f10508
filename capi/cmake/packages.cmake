# Debian packages: cmake --preset package && cmake --build --preset package && cpack --preset deb. sotto has the library
# and the tools, libsotto-dev what programs are compiled with. What they depend on is found by dpkg-shlibdeps.
foreach(package_component "sotto;runtime" "libsotto-dev;development")
  list(GET package_component 0 package)
  list(GET package_component 1 component)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${package} RENAME copyright
    COMPONENT ${component})
endforeach()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME sotto)
set(CPACK_PACKAGE_VENDOR Sotto)
set(CPACK_PACKAGE_CONTACT "Sotto <sotto@packages.invalid>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL runtime development)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY "=")  # before 1.0 every minor version may break
# Between the packages the version is the same, revision included.
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_COMPONENT_RUNTIME_DESCRIPTION "The shared library libsotto.so and the tools sotto and sotto-run.")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME sotto)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION science)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SUGGESTS "python3, python3-matplotlib, python3-numpy, iproute2")  # sotto bench net
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "For programs in C and C++: headers, the CMake package and the pkg-config file.")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libsotto-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "sotto (= ${PROJECT_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE})")
include(CPack)
