// Linked into every program of a sanitizer build (make SAN=1).
//
// LeakSanitizer runs at exit, when Open MPI has unloaded its plug-ins: what they leaked then comes
// from an "unknown module" that no suppression can name. So plug-ins stay loaded, and the
// libraries' own leaks are named here; ours are still found.

extern "C" int dlclose(void*) { return 0; }

extern "C" const char* __lsan_default_suppressions() {
  return "leak:libmpi\n"
         "leak:libopen-pal\n"
         "leak:libopen-rte\n"
         "leak:libpmix\n"
         "leak:libhwloc\n"
         "leak:libevent\n"
         "leak:libmca_common\n"
         "leak:/openmpi/\n"   // plug-ins
         "leak:vasprintf\n";  // theirs: the C library's frame hides who called it
}

extern "C" const char* __lsan_default_options() { return "print_suppressions=0"; }
