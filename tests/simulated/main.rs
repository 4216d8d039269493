//! The tests in simulated worlds. They are a program of their own beside the real binary's: the server runs in the
//! test's thread, on virtual time, with the settings of a process that the runtime has once.

mod support;

mod http1;
mod http2;
mod large_configurations;
mod proxy;
mod scripts;
mod second_protocol;
mod services;
