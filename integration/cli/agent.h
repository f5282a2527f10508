// sotto-run --agent: what sotto-run starts in a remote shell to run the ranks of that machine.
#pragma once

namespace sotto_cli {

// Does one job that it is given on standard input (protocol.h); returns the exit code. Kills its
// ranks when standard input ends, when nothing is heard for too long, or when it is to end itself.
int run_agent();

}  // namespace sotto_cli
