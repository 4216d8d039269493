//! Ten thousand half-finished requests beside fast clients: no bytes are lost, no client hangs. A program of its own,
//! because it takes nearly all descriptors that a process may have.

mod common;

/// `many_connections_io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::cell::Cell;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

use common::*;
use gale_runtime::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Answers each line with its length and the line.
async fn serve_lines(stream: Stream) {
    let (mut input, mut output) = (Buffer::new(), Output::new());
    loop {
        let Some(end) = input.readable().iter().position(|&byte| byte == b'\n') else {
            match stream.recv(&mut input, 1000).await {
                Ok(1..) => continue,
                _ => return,
            }
        };
        let line = String::from_utf8(input.readable()[..end].to_vec()).unwrap();
        input.consume(end + 1);
        output.append(format!("{} {line}\n", line.len()).as_bytes()).unwrap();
        if stream.send_all(&mut output).await.is_err() {
            return;
        }
    }
}

/// The peer of a connection that is served.
fn client() -> UnixStream {
    let (near, peer) = UnixStream::pair().unwrap();
    peer.set_nonblocking(true).unwrap();
    spawn(serve_lines(Stream::from_fd(near.into()).unwrap()));
    peer
}

async fn answer_to(peer: &mut UnixStream) -> String {
    let mut answer = Vec::new();
    let mut turns = 0;
    while answer.last() != Some(&b'\n') {
        let mut piece = [0; 200];
        match peer.read(&mut piece) {
            Ok(0) => panic!("the connection was closed"),
            Ok(count) => answer.extend_from_slice(&piece[..count]),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        turns += 1;
        assert!(turns < 1_000_000, "no answer");
        yield_now().await;
    }
    String::from_utf8(answer).unwrap()
}

fn answered(line: &str) -> String {
    format!("{} {line}\n", line.len())
}

#[test]
fn incomplete_requests_delay_no_others_and_are_finished_later() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
    let descriptors = limit.maximum.unwrap_or(u64::MAX);
    let count = (descriptors.saturating_sub(200) / 2).min(10_000) as usize;
    let ring = RingOptions { buffers: 16, ..RingOptions::default() };
    event_loop(LoopOptions { ring, ..simulated_time() }).run(async {
        let mut slow: Vec<UnixStream> = (0..count).map(|_| client()).collect();
        turns(2).await;
        for (number, peer) in slow.iter_mut().enumerate() {
            peer.write_all(format!("GET /slow/{number}").as_bytes()).unwrap();
        }
        let fast_rounds = Rc::new(Cell::new(0));
        for number in 0..20 {
            let mut peer = client();
            let rounds = Rc::clone(&fast_rounds);
            spawn(async move {
                for round in 0..100 {
                    let line = format!("fast {number} {round}");
                    peer.write_all(format!("{line}\n").as_bytes()).unwrap();
                    assert_eq!(answer_to(&mut peer).await, answered(&line));
                    rounds.set(rounds.get() + 1);
                }
            });
        }
        while fast_rounds.get() < 2000 {
            yield_now().await;
        }
        assert!(leased_bytes() >= count * 1024, "all of them wait for the rest");
        // Slow enough to be waited for in the cheapest way.
        sleep(Duration::from_secs(10)).await;
        turns(20).await;
        for peer in &mut slow {
            peer.write_all(b" HTTP").unwrap();
        }
        turns(2).await;
        for peer in &mut slow {
            peer.write_all(b"/1.1\nnext\n").unwrap();
        }
        for (number, peer) in slow.iter_mut().enumerate() {
            let mut answers = answer_to(peer).await;
            let expected = answered(&format!("GET /slow/{number} HTTP/1.1")) + &answered("next");
            while answers.len() < expected.len() {
                answers += &answer_to(peer).await;
            }
            assert_eq!(answers, expected);
        }
        drop(slow);
        while task_count() > 0 {
            yield_now().await;
        }
        assert_eq!(leased_bytes(), 0);
    });
}
