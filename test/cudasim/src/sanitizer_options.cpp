// Options of the ASan build. Linked in every build, read in that one only.
extern "C" const char* __asan_default_options() {
  // Leaks: MPI's own. Return from fibers: their stacks are reused on purpose. Faults of device
  // addresses are the simulator's to explain.
  return "detect_leaks=0:detect_stack_use_after_return=0:allow_user_segv_handler=1";
}
