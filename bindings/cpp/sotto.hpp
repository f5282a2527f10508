// The C++ interface of Sotto: sotto.h as move-only handles. Header only, C++11 and later.
//
//   sotto::context context = sotto::context::create();
//   sotto::comm comm = sotto::comm::create(context);  // rank, size and rendezvous: the launcher's
//   std::vector<sotto::param> params{sotto::param("weights", weights).grad(gradient)};
//   sotto::optim optim = sotto::optim::create(comm, json, params);
//   while (next_batch()) {
//     backward();
//     sotto::wait(optim.step());
//   }
//
// What a function does, allows and refuses, which threads may call it and whether it blocks is said
// in sotto.h at the C function of the same name: comm::all_reduce is sotto_all_reduce,
// optim::state_export is sotto_optim_state_export. The rules that this interface adds:
//
// Errors. Where exceptions are enabled functions throw sotto::error, a std::runtime_error with the
// code and the library's text. Where they are not (-fno-exceptions), or SOTTO_CPP_NO_EXCEPTIONS is
// defined before the first include, functions return sotto::result<T>, or result<void>: a status
// with code and text, and a value that is empty after an error. outcome<T> stands for both below.
// The two forms live in inline namespaces of their own, as do ABI versions, so that objects of one
// program may be compiled with different ones. sotto::wait takes either form.
//
// Lifetime. A handle destroys what it owns, and cannot be copied. Destructors do not throw; what
// the library meets in one is not reported: close() is the same and says it. The order of
// destruction does not matter to the library: children keep their parents alive. An empty handle
// (default made, moved from, closed) is refused by every function with INVALID_ARGUMENT.
//   - ~comm, ~optim, ~outer and ~overlap wait for what is in flight, at most its deadline.
//   - ~op waits until the operation has ended, for which its deadline provides, since memory that
//     it reads and writes may be gone next. detach() gives it up without that: then the memory has
//     to live until the comm has been destroyed.
//   - ~overlap_round withdraws a round that was not finished. ~group starts nothing of what was
//     collected, since half of it, where an exception passes by, would be what no peer expects.
//   - In a callback of the library nothing can be waited for or destroyed: handles that end there
//     are leaked, and operations given up as by detach().
//
// Memory. Buffers are borrowed, as sotto.h says: until the operation has ended, or, those of
// optim, outer and overlap, as long as these live. Lists of buffers, parameters and parts, and
// texts, are borrowed during the call alone.
//
// Nothing is allocated but texts, errors and exported states.
#ifndef SOTTO_SOTTO_HPP
#define SOTTO_SOTTO_HPP

#include "cpp/buffer.hpp"
#include "cpp/call.hpp"
#include "cpp/codec.hpp"
#include "cpp/collectives.hpp"
#include "cpp/comm.hpp"
#include "cpp/config.hpp"
#include "cpp/context.hpp"
#include "cpp/handle.hpp"
#include "cpp/library.hpp"
#include "cpp/op.hpp"
#include "cpp/optim.hpp"
#include "cpp/outer.hpp"
#include "cpp/overlap.hpp"
#include "cpp/params.hpp"
#include "cpp/span.hpp"
#include "cpp/status.hpp"

#endif  // SOTTO_SOTTO_HPP
