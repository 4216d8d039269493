//! Accepting and reading without free descriptors. A program of its own, because the limit applies to the process.

mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use common::*;
use gale_files::{self as files, *};
use gale_runtime::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The limit applies to all tests of the program, so they run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn accept_tells_of_exhaustion_waits_without_spinning_and_recovers() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
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

/// `O_DIRECT` needs a descriptor of its own.
#[test]
fn refused_direct_read_goes_through_the_page_cache() {
    const PIECE: usize = 65536;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = Directory::new();
    let content: Vec<u8> = (0..4 * PIECE).map(|index| (index / 7) as u8).collect();
    run_real(async {
        let file = files::open(&directory.file("file", &content), OpenFlags::READ).await.unwrap();
        let pool = ThreadPool::new("test", 1, 10);
        let how = ReadHow { direct: Some(512), by_ring: true, ..ReadHow::default() };
        let limit = getrlimit(Resource::Nofile);
        for piece in 0..4 {
            if piece == 0 {
                setrlimit(Resource::Nofile, Rlimit { current: Some(0), maximum: limit.maximum }).unwrap();
            }
            let offset = piece * PIECE;
            let read = file.begin_read(&pool, offset as u64, PIECE, how).unwrap().await;
            if piece == 1 {
                setrlimit(Resource::Nofile, limit).unwrap();
            }
            assert!(read.unwrap()[..] == content[offset..offset + PIECE], "{piece}");
        }
    });
}
