//! Accepting when the process has no descriptors left. A program of its own, because the limit is the process's.

mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::time::Duration;

use common::*;
use gale_runtime::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn accept_tells_of_exhaustion_waits_without_spinning_and_recovers() {
    let mut event_loop = event_loop(simulated_time());
    let remote = event_loop.remote();
    event_loop.run(async move {
        let options = AcceptOptions { batch: MULTI_ACCEPT_BATCH, ..AcceptOptions::default() };
        let listener = Listener::bind(&any_port(), 16, options).unwrap();
        let address = listener.local_address().unwrap().inet().unwrap();
        let client = std::net::TcpStream::connect(address).unwrap();
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), maximum: limit.maximum }).unwrap();
        let before = remote.turns().count();
        for _ in 0..3 {
            let error = listener.accept().await.unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
            sleep(Duration::from_millis(500)).await;
        }
        assert!(remote.turns().count() - before < 50, "the loop was kept awake");
        setrlimit(Resource::Nofile, limit).unwrap();
        let (_server, peer) = listener.accept().await.unwrap();
        assert_eq!(peer.inet(), Some(client.local_addr().unwrap()));
    });
}
