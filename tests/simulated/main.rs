//! Tests in simulated worlds. They are a separate test program: the server runs in the test's thread, on virtual time,
//! and changes the runtime's process-wide settings.

mod support;

mod http1;
mod http2;
mod large_configurations;
mod proxy;
mod scripts;
mod second_protocol;
mod services;
