// SIGTERM, SIGUSR1 and SIGUSR2 ask for a stop at the end of the step. Only this rank hears its
// request: all ranks have to agree on it.
#pragma once

namespace qshard {

// To be called once, before threads that compute are made: from then on a thread that does nothing
// else receives the three signals, and no computing thread is interrupted.
void watch_stop_signals();

bool stop_requested();

}  // namespace qshard
