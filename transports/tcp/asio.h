// The only file that includes Boost.Asio. Asio accepts, connects, resolves names, keeps timers and
// blocks; connected sockets are served with sendmsg and recvmsg (stream.h). Only overloads with
// error codes are used, so only the constructor of an io_context throws.
#pragma once

#include <utility>  // Asio 1.74 in C++20 needs it before its own headers

#ifndef BOOST_ASIO_DISABLE_CO_AWAIT
#define BOOST_ASIO_DISABLE_CO_AWAIT
#endif
// Handlers run on one thread at a time, which took over from another under a lock. ThreadSanitizer
// does not know fences.
#ifndef BOOST_ASIO_DISABLE_FENCED_BLOCK
#define BOOST_ASIO_DISABLE_FENCED_BLOCK
#endif
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wpedantic"
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ip/udp.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#pragma GCC diagnostic pop

namespace sotto::tcp {

namespace asio = boost::asio;
using boost::system::error_code;
using Endpoint = asio::ip::tcp::endpoint;

}  // namespace sotto::tcp
