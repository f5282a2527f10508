// Keeps sockets out of forked children. A child that had them would keep connections open when this
// process dies, and ports taken that it has closed: other ranks would wait for a rank that is gone.
// A program that is executed does not have them either: they are close-on-exec.
//
// In the child a socket is /dev/null: its number stays taken until its owner there closes it.
//
// Threads: any.
#pragma once

namespace sotto::tcp {

// From now on forked children do not have the descriptor.
void keep_from_children(int fd);
// Closes it. fd: of keep_from_children.
void close_kept(int fd);
// Somebody else closes it, now.
void forget_kept(int fd);

}  // namespace sotto::tcp
