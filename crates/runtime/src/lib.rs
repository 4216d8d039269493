//! The event loop: executor, timers, drivers, sockets, files, thread pools.
