# Bind functions of glibc that got a new version after 2.28 by their old one, which every later glibc still has.
#
# A library linked on a system of today asks for pthread_create@GLIBC_2.34 and pow@GLIBC_2.29, and does not load on the
# older systems on which torch's own wheels run. Linked first against stubs that define the old versions, it asks for
# those, in the libraries that had them, as if it had been linked there. x86-64: other architectures have other versions.

set(_pthread_GLIBC_2.2.5
  __pthread_key_create pthread_attr_getstacksize pthread_attr_setguardsize pthread_attr_setstacksize pthread_cancel
  pthread_condattr_setpshared pthread_create pthread_detach pthread_getspecific pthread_join pthread_key_create
  pthread_key_delete pthread_kill pthread_mutex_trylock pthread_mutexattr_destroy pthread_mutexattr_init
  pthread_mutexattr_setpshared pthread_mutexattr_settype pthread_once pthread_rwlock_destroy pthread_rwlock_init
  pthread_rwlock_rdlock pthread_rwlock_timedrdlock pthread_rwlock_timedwrlock pthread_rwlock_tryrdlock
  pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock pthread_rwlockattr_destroy
  pthread_rwlockattr_init pthread_rwlockattr_setpshared pthread_setspecific pthread_sigmask pthread_spin_destroy
  pthread_spin_init pthread_spin_lock pthread_spin_trylock pthread_spin_unlock sem_destroy sem_init sem_post
  sem_timedwait sem_trywait sem_wait)
set(_dl_GLIBC_2.2.5 dlclose dlerror dlopen dlsym dlvsym)
set(_dl_GLIBC_2.3.4 dlmopen)
set(_rt_GLIBC_2.2.5 shm_open shm_unlink)
set(_m_GLIBC_2.2.5 exp exp2 log log2 pow)

set(_pthread_soname libpthread.so.0)
set(_dl_soname libdl.so.2)
set(_rt_soname librt.so.1)
set(_m_soname libm.so.6)

# Make `target` ask for the old versions of what is in the libraries named: pthread, dl, rt, m.
function(link_against_old_glibc target)
  foreach(library IN LISTS ARGN)
    if(NOT TARGET old_glibc_${library})
      set(source "")
      set(map "")
      foreach(version GLIBC_2.2.5 GLIBC_2.3.4)
        list(JOIN _${library}_${version} "; " names)
        if(names)
          string(APPEND map "${version} { ${names}; };\n")
          foreach(name IN LISTS _${library}_${version})
            string(APPEND source "asm(\".globl ${name}\\n.type ${name}, @function\\n${name}:\\n\");\n")
          endforeach()
        endif()
      endforeach()
      set(file "${CMAKE_CURRENT_BINARY_DIR}/old_glibc/${library}")
      file(CONFIGURE OUTPUT ${file}.cpp CONTENT "${source}" @ONLY)
      file(CONFIGURE OUTPUT ${file}.map CONTENT "${map}" @ONLY)
      add_library(old_glibc_${library} SHARED ${file}.cpp)
      set_target_properties(old_glibc_${library} PROPERTIES NO_SONAME ON LIBRARY_OUTPUT_DIRECTORY
        "${CMAKE_CURRENT_BINARY_DIR}/old_glibc")
      target_link_options(old_glibc_${library} PRIVATE
        -nostdlib -Wl,-soname,${_${library}_soname} -Wl,--version-script,${file}.map)
    endif()
    # Static libraries that come later on the linker's command line need them, too.
    target_link_libraries(${target} PRIVATE -Wl,--no-as-needed old_glibc_${library} -Wl,--as-needed)
  endforeach()
endfunction()
