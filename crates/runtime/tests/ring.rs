//! Features of io_uring alone: set-up that may be refused, small queues and buffers, operations that outlive their
//! stream.

mod common;

const DRIVER: DriverChoice = DriverChoice::IoUring;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use common::*;
use gale_runtime::*;

/// True if this kernel has io_uring; tests of its details need it.
fn is_there() -> bool {
    event_loop(simulated_time()).driver_name() == "io_uring"
}

/// True if sends use the ring: short responses fire-and-forget, even into a full socket, and others queued. (That needs
/// provided buffers.) On a thread of its own, because tests call it within their loops.
fn sends_on_ring() -> bool {
    let ask = || {
        event_loop(simulated_time()).run(async {
            let (server, _client, _) = full_pair().await;
            server.try_send_copy(b"?", false).unwrap() > 0
        })
    };
    let sends = std::thread::spawn(ask).join().unwrap();
    if !sends {
        skip("a part: this ring does not send");
    }
    sends
}

fn with_ring(ring: RingOptions) -> LoopOptions {
    let options = LoopOptions { ring, ..simulated_time() };
    let has_ring = |options: &LoopOptions| event_loop(options.clone()).driver_name() == "io_uring";
    assert!(ring.refusal.is_some() || has_ring(&options) == has_ring(&simulated_time()), "not with {ring:?}");
    options
}

/// Makes the stream use the ring: a receive waits and gets data.
async fn warm_up(stream: &Stream, peer: &Stream) {
    let mut received = Box::pin(receive(stream, 4));
    assert!(poll_once(&mut received).await.is_pending());
    send(peer, b"warm").await;
    assert_eq!(received.await, b"warm");
}

#[test]
fn a_refused_ring_is_replaced_by_epoll_which_behaves_the_same() {
    for errno in [libc::EPERM, libc::ENOSYS, libc::EINVAL, libc::ENOMEM] {
        let mut event_loop = event_loop(with_ring(RingOptions { refusal: Some(errno), ..RingOptions::default() }));
        assert_eq!(event_loop.driver_name(), "epoll");
        assert_eq!(event_loop.driver_reason().unwrap().raw_os_error(), Some(errno));
        event_loop.run(async {
            let (server, client) = tcp_pair().await;
            warm_up(&server, &client).await;
        });
    }
}

#[test]
fn best_driver_is_a_modern_ring_or_epoll_with_the_reason() {
    let with = |driver, kernel_max| {
        let ring = RingOptions { kernel_max, ..RingOptions::default() };
        let event_loop = event_loop(LoopOptions { driver, ..with_ring(ring) });
        (event_loop.driver_name(), event_loop.driver_reason().is_none())
    };
    assert_eq!(with(DriverChoice::Epoll, None), ("epoll", true));
    assert_eq!(with(DriverChoice::Auto, Some((6, 0))), ("epoll", false));
    if is_there() {
        assert_eq!(with(DriverChoice::IoUring, Some((6, 0))), ("io_uring", true));
        // This kernel may be an old one.
        let best = with(DriverChoice::Auto, None);
        assert_eq!(best.0 == "io_uring", best.1);
    }
}

/// Serves many clients at once, each with several rounds of question and answer.
async fn serve_many(clients: u32, rounds: u32) {
    let options = AcceptOptions { batch: MULTI_ACCEPT_BATCH, ..AcceptOptions::default() };
    let listener = Listener::bind(&any_port(), 1024, options).unwrap();
    let address = listener.local_address().unwrap();
    spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            spawn(async move {
                let (mut input, mut output) = (Buffer::new(), Output::new());
                while stream.recv(&mut input, 1000).await.unwrap() > 0 {
                    output.push(input.take_lease().unwrap());
                    output.push(b".");
                    stream.send_all(&mut output).await.unwrap();
                }
            });
        }
    });
    let (sender, done) = std::sync::mpsc::channel();
    for number in 0..clients {
        let (address, sender) = (address.clone(), sender.clone());
        spawn(async move {
            let client = Stream::connect(&address).await.unwrap();
            for round in 0..rounds {
                let text = format!("client {number} round {round}");
                let mut output = Output::new();
                output.append(text.as_bytes()).unwrap();
                client.send_all(&mut output).await.unwrap();
                assert_eq!(receive(&client, text.len() + 1).await, format!("{text}.").as_bytes());
            }
            sender.send(number).unwrap();
        });
    }
    drop(sender);
    let mut seen = 0;
    while seen < clients {
        yield_now().await;
        seen += done.try_iter().count() as u32;
    }
}

#[test]
fn few_buffers_and_tiny_queues_lose_nothing() {
    for (submissions, completions, buffers) in [(1, 2, 1), (4, 8, 16), (8, 16, 0), (512, 4096, 4)] {
        for multishot in [true, false] {
            let ring = RingOptions { submissions, completions, buffers, multishot, ..RingOptions::default() };
            event_loop(with_ring(ring)).run(serve_many(200, 5));
        }
    }
}

#[test]
fn sixteen_buffers_serve_two_hundred_clients_at_once() {
    let ring = RingOptions { buffers: 16, ..RingOptions::default() };
    event_loop(with_ring(ring)).run(async {
        let mut pairs = Vec::new();
        for _ in 0..200 {
            let (server, client) = unix_pair();
            warm_up(&server, &client).await;
            let mut input = Buffer::new();
            assert!(poll_once(&mut Box::pin(server.recv(&mut input, 1000))).await.is_pending());
            pairs.push((server, client));
        }
        turns(2).await;
        for round in 0..10 {
            for (_, client) in &pairs {
                send_now(client, &pattern(500 + round));
            }
            for (server, _) in &pairs {
                assert_eq!(receive(server, 500 + round).await, pattern(500 + round));
            }
        }
        if sends_on_ring() {
            assert!(ring_counters().buffers_missed > 0, "there were enough");
        }
    });
}

/// Writes without the driver, so that everything happens within one turn.
fn send_now(stream: &Stream, bytes: &[u8]) {
    assert_eq!(rustix::io::write(stream, bytes).unwrap(), bytes.len());
}

#[test]
fn a_completion_queue_that_overflows_loses_nothing() {
    let ring = RingOptions { submissions: 2, completions: 4, ..RingOptions::default() };
    event_loop(with_ring(ring)).run(async {
        let mut pairs = Vec::new();
        for _ in 0..100 {
            let (server, client) = unix_pair();
            warm_up(&server, &client).await;
            pairs.push((server, client));
        }
        for round in 0..10 {
            for (server, _) in &pairs {
                let mut input = Buffer::new();
                let _ = poll_once(&mut Box::pin(server.recv(&mut input, 1000))).await;
                assert!(poll_once(&mut Box::pin(server.peer_closed())).await.is_pending());
            }
            turns(1).await;
            for (_, client) in &pairs {
                send_now(client, &pattern(300 + round));
            }
            for (server, _) in &pairs {
                assert_eq!(receive(server, 300 + round).await, pattern(300 + round));
            }
        }
        if is_there() {
            assert!(ring_counters().overflows > 0, "the queue was large enough");
        }
        for (server, client) in pairs {
            drop(client);
            server.peer_closed().await;
        }
    });
}

#[test]
fn a_full_submission_queue_does_not_stop_cancellation() {
    for (submissions, completions) in [(1, 2), (2, 4), (8, 16)] {
        let ring = RingOptions { submissions, completions, ..RingOptions::default() };
        event_loop(with_ring(ring)).run(async {
            for delay in 0..3 {
                let mut pairs = Vec::new();
                for _ in 0..50 {
                    let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
                    let (server, mut client) = (Stream::from_fd(near.into()).unwrap(), far);
                    client.write_all(b"first").unwrap();
                    assert_eq!(receive(&server, 5).await, b"first");
                    let mut input = Buffer::new();
                    assert!(poll_once(&mut Box::pin(server.recv(&mut input, 1000))).await.is_pending());
                    assert!(poll_once(&mut Box::pin(server.peer_closed())).await.is_pending());
                    // More than the socket takes, so it has to wait for room.
                    let mut output = Output::new();
                    output.push(Bytes::from(vec![7; 1 << 20]));
                    assert!(poll_once(&mut Box::pin(server.send_all(&mut output))).await.is_pending());
                    pairs.push((server, client));
                }
                turns(delay).await;
                let (servers, clients): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
                // A hundred and fifty cancellations in one turn.
                drop(servers);
                turns(2).await;
                for mut client in clients {
                    client.set_nonblocking(true).unwrap();
                    // All sent data, and then the end.
                    client.read_to_end(&mut Vec::new()).unwrap();
                }
                let (server, client) = unix_pair();
                warm_up(&server, &client).await;
            }
        });
    }
}

#[test]
fn half_finished_requests_hold_no_buffer_of_the_ring() {
    let ring = RingOptions { buffers: 4, ..RingOptions::default() };
    event_loop(with_ring(ring)).run(async {
        let mut slow = Vec::new();
        for _ in 0..100 {
            let (server, client) = unix_pair();
            warm_up(&server, &client).await;
            let mut input = Buffer::new();
            assert!(poll_once(&mut Box::pin(server.recv(&mut input, 100))).await.is_pending());
            send(&client, b"GET /").await;
            slow.push((server, client));
        }
        yield_now().await;
        let (server, client) = unix_pair();
        for _ in 0..10 {
            warm_up(&server, &client).await;
        }
        for (server, _) in &slow {
            assert_eq!(receive(server, 5).await, b"GET /");
        }
    });
}

#[test]
fn buffers_are_returned_when_their_bytes_are_consumed() {
    let ring = RingOptions { buffers: 2, ..RingOptions::default() };
    event_loop(with_ring(ring)).run(async {
        let (server, client) = unix_pair();
        for _ in 0..20 {
            warm_up(&server, &client).await;
        }
        assert_eq!(ring_counters().buffers_missed, 0);
    });
}

#[test]
fn slots_are_used_again_while_their_completions_are_still_coming() {
    event_loop(simulated_time()).run(async {
        for round in 0..200u32 {
            let (server, client) = unix_pair();
            let mut input = Buffer::new();
            assert!(poll_once(&mut Box::pin(server.recv(&mut input, 100))).await.is_pending());
            assert!(poll_once(&mut Box::pin(server.peer_closed())).await.is_pending());
            if round % 3 == 0 {
                yield_now().await;
            }
            send(&client, b"stale").await;
            if round % 2 == 0 {
                drop(server);
                drop(client);
            } else {
                drop(client);
                drop(server);
            }
            let (server, client) = unix_pair();
            warm_up(&server, &client).await;
            assert_eq!(receive_after(&server, &client, b"fresh").await, b"fresh");
        }
    });
}

async fn receive_after(server: &Stream, client: &Stream, bytes: &'static [u8]) -> Vec<u8> {
    send(client, bytes).await;
    receive(server, bytes.len()).await
}

#[test]
fn a_dropped_send_is_completed_by_the_next_one_in_order() {
    if !sends_on_ring() {
        return;
    }
    event_loop(simulated_time()).run(async {
        let (server, client) = tcp_pair().await;
        warm_up(&server, &client).await;
        let mut output = Output::new();
        output.append(b"first ").unwrap();
        output.push(Bytes::from_static(b"second "));
        assert!(poll_once(&mut Box::pin(server.send(&mut output))).await.is_pending(), "it is queued");
        assert_eq!(output.len_bytes(), 13, "and still waits");
        output.push(b"third");
        server.send_all(&mut output).await.unwrap();
        assert!(output.is_empty());
        assert_eq!(receive(&client, 18).await, b"first second third");
    });
}

#[test]
fn a_send_whose_queue_has_gone_leaves_the_stream_usable() {
    if !sends_on_ring() {
        return;
    }
    event_loop(simulated_time()).run(async {
        let (server, client) = tcp_pair().await;
        warm_up(&server, &client).await;
        let mut output = Output::new();
        output.push(b"abandoned ");
        assert!(poll_once(&mut Box::pin(server.send(&mut output))).await.is_pending());
        drop(output);
        send(&server, b"next").await;
        assert_eq!(receive(&client, 14).await, b"abandoned next");
    });
}

#[test]
fn a_send_that_goes_on_after_its_stream_has_gone_sends_its_own_bytes() {
    if !sends_on_ring() {
        return;
    }
    // So short a queue is submitted while streams are being closed: the kernel continues sends whose completion it
    // reports later.
    let ring = RingOptions { submissions: 1, ..RingOptions::default() };
    event_loop(with_ring(ring)).run(async {
        let leased = leased_bytes();
        let mut streams = Vec::new();
        let mut peers = Vec::new();
        for _ in 0..50 {
            let (server, client, filled) = full_pair().await;
            let mut output = Output::new();
            output.push(Lease::copy_of(&[b'o'; 900]).unwrap());
            output.push(Lease::copy_of(&[b'o'; 900]).unwrap());
            assert!(poll_once(&mut Box::pin(server.send_all(&mut output))).await.is_pending());
            streams.push((server, output));
            peers.push((client, filled));
        }
        turns(1).await;
        let held = leased_bytes() - leased;
        drop(streams);
        assert_eq!(leased_bytes() - leased, held, "the kernel may read it still");
        let next: Vec<Lease> = (0..100).map(|_| Lease::copy_of(&[b'x'; 900]).unwrap()).collect();
        // There is room now. Older kernels continue the sends in the middle of this.
        let mut sent: Vec<u8> = peers.iter().flat_map(|(client, filled)| read_now(client).split_off(*filled)).collect();
        turns(2).await;
        sent.extend(peers.iter().flat_map(|(client, _)| read_now(client)));
        assert!(sent.iter().all(|&byte| byte == b'o'), "what has the memory next was sent");
        assert!(!sent.is_empty(), "no send went on");
        drop(next);
        assert_eq!(leased_bytes(), leased);
    });
}

/// Reads the available data, without the driver.
fn read_now(stream: &Stream) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 20];
    let mut length = 0;
    while let Ok(count @ 1..) = rustix::io::read(stream, &mut bytes[length..]) {
        length += count;
    }
    bytes.truncate(length);
    bytes
}

#[test]
fn an_error_of_a_queued_send_gives_the_bytes_back() {
    event_loop(simulated_time()).run(async {
        let (server, client) = unix_pair();
        warm_up(&server, &client).await;
        drop(client);
        // Sockets are closed when the turn ends.
        yield_now().await;
        yield_now().await;
        let mut output = Output::new();
        output.push(b"too late");
        assert_eq!(server.send_all(&mut output).await.unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
        assert_eq!(output.len_bytes(), 8);
    });
}

#[test]
fn fire_and_forget_answers_leave_in_order_however_they_are_followed() {
    event_loop(simulated_time()).run(async {
        for closes in [false, true] {
            let (server, client) = tcp_pair().await;
            warm_up(&server, &client).await;
            // Two fire-and-forget sends in a row, then a queued one, then the end of the stream.
            assert_eq!(server.try_send_copy(b"one ", false).unwrap(), 4);
            assert_eq!(server.try_send_copy(b"two ", false).unwrap(), 4);
            if closes {
                drop(server);
                assert_eq!(receive_all(&client).await, b"one two ");
                continue;
            }
            let mut output = Output::new();
            output.push(b"three ");
            server.send_all(&mut output).await.unwrap();
            assert_eq!(server.try_send_copy(b"four", false).unwrap(), 4);
            server.shutdown_write().unwrap();
            assert_eq!(receive_all(&client).await, b"one two three four");
        }
    });
}

/// Several chunks, of which the first is a lease.
fn chunks_of(bytes: &[u8]) -> Output {
    let mut output = Output::new();
    let (first, rest) = bytes.split_at(bytes.len() / 3);
    output.push(Lease::copy_of(first).unwrap());
    rest.chunks(rest.len().div_ceil(2)).for_each(|chunk| output.push(chunk.to_vec()));
    output
}

#[test]
fn fire_and_forget_chunks_are_kept_until_the_turn_ends_and_leave_in_order() {
    let sends = sends_on_ring();
    event_loop(simulated_time()).run(async {
        let (server, client) = tcp_pair().await;
        warm_up(&server, &client).await;
        let answer: Vec<u8> = (0..30_000_u32).map(|number| (number / 13) as u8).collect();
        let leased = leased_bytes();
        for round in 0..3 {
            let mut output = chunks_of(&answer);
            assert_eq!(server.try_send(&mut output, false).unwrap(), answer.len(), "round {round}");
            assert!(output.is_empty());
            assert_eq!(leased_bytes() > leased, sends, "round {round}");
            if round == 1 {
                // More data behind it in the same turn.
                let mut more = Output::new();
                more.push(b"more");
                server.send_all(&mut more).await.unwrap();
            }
            yield_now().await;
            assert_eq!(leased_bytes(), leased, "round {round}");
        }
        // If it is too large for that, the caller has to send it.
        if sends {
            let mut large = chunks_of(&[0; 33 * 1024]);
            assert_eq!((server.try_send(&mut large, false).unwrap(), large.len_bytes()), (0, 33 * 1024));
        }
        drop(server);
        assert!(receive_all(&client).await == [&answer[..], &answer, b"more", &answer].concat());
    });
}

#[test]
fn rest_of_a_fire_and_forget_send_to_a_full_socket_is_sent_later() {
    event_loop(simulated_time()).run(async {
        let ways = [(false, false), (true, false), (false, true), (true, true)];
        for (closes, ends, in_chunks) in
            ways.into_iter().flat_map(|(closes, ends)| [(closes, ends, false), (closes, ends, true)])
        {
            let (server, client) = tcp_pair().await;
            warm_up(&server, &client).await;
            let mut wanted = Vec::new();
            // Until the socket is full and the driver owns the rest.
            for number in 0..2000 {
                let answer: Vec<u8> = (0..32 * 1024).map(|position| (position / 251 + number) as u8).collect();
                let taken = if in_chunks {
                    let mut output = chunks_of(&answer);
                    server.try_send(&mut output, false).unwrap()
                } else {
                    server.try_send_copy(&answer, false).unwrap()
                };
                match taken {
                    0 => break,
                    count => wanted.extend_from_slice(&answer[..count]),
                }
                yield_now().await;
            }
            assert!(wanted.len() < 2000 * 32 * 1024, "the socket takes everything");
            if ends {
                // Behind the data that the driver still has to send.
                server.shutdown_write().unwrap();
                let _kept = Some(server).filter(|_| !closes);
                assert!(receive_all(&client).await == wanted, "closes: {closes}, and ends");
                continue;
            }
            if !closes {
                let mut output = Output::new();
                output.push(b"behind it");
                wanted.extend_from_slice(b"behind it");
                let sent = spawn_sending(server, output);
                assert!(receive_all(&client).await == wanted, "closes: {closes}");
                assert!(sent.get());
                continue;
            }
            drop(server);
            assert!(receive_all(&client).await == wanted, "closes: {closes}");
        }
    });
}

#[test]
fn fire_and_forget_sends_do_not_make_a_turn_longer() {
    const EVENTS_MAX: usize = 2;
    if !sends_on_ring() {
        return;
    }
    event_loop(LoopOptions { events_max: EVENTS_MAX, ..simulated_time() }).run(async {
        let turns_of_readers = Rc::new(RefCell::new(HashMap::<u64, usize>::new()));
        let mut clients = Vec::new();
        for _ in 0..10 {
            let (server, client) = tcp_pair().await;
            warm_up(&server, &client).await;
            clients.push(client);
            let turns_of_readers = Rc::clone(&turns_of_readers);
            spawn(async move {
                while receive(&server, 4).await == b"more" {
                    *turns_of_readers.borrow_mut().entry(turn()).or_default() += 1;
                    assert_eq!(server.try_send_copy(b"pong", false).unwrap(), 4);
                }
            });
        }
        for _ in 0..20 {
            // All at once, without the loop, so that a turn finds them together.
            for client in &clients {
                rustix::net::send(client, b"more", rustix::net::SendFlags::empty()).unwrap();
            }
            for client in &clients {
                assert_eq!(receive(client, 4).await, b"pong");
            }
        }
        let most = *turns_of_readers.borrow().values().max().unwrap();
        assert!(most <= EVENTS_MAX, "{most} in a turn");
    });
}

#[test]
fn every_fire_and_forget_send_that_failed_is_told_of_however_small_the_completion_queue_is() {
    let sends = sends_on_ring();
    let ring = RingOptions { submissions: 2, completions: 4, ..RingOptions::default() };
    event_loop(with_ring(ring)).run(async {
        let mut pairs = Vec::new();
        for _ in 0..150 {
            pairs.push(full_pair().await);
        }
        for (number, (server, ..)) in pairs.iter().enumerate() {
            let answer = format!("answer {number:3}");
            if sends {
                assert_eq!(server.try_send_copy(answer.as_bytes(), false).unwrap(), answer.len());
            } else {
                let mut output = Output::new();
                output.push(answer);
                let server = Stream::from_fd(server.as_fd().try_clone_to_owned().unwrap()).unwrap();
                spawn_sending(server, output);
            }
        }
        for (number, (_server, client, filled)) in pairs.iter().enumerate() {
            let received =
                timeout(Duration::from_secs(1), receive(client, filled + 10)).await.expect("an answer was lost");
            assert_eq!(received[*filled..], *format!("answer {number:3}").as_bytes());
        }
    });
}

#[test]
fn a_closed_connection_gets_its_last_answer_when_there_is_room() {
    if !sends_on_ring() {
        return;
    }
    event_loop(simulated_time()).run(async {
        let (server, client, filled) = full_pair().await;
        assert_eq!(server.try_send_copy(b"answer", false).unwrap(), 6);
        // Once in the turn of the send, and once after it has failed.
        let leased = leased_bytes();
        drop(server);
        turns(2).await;
        assert!(leased_bytes() > leased, "what waits is not counted");
        assert_eq!(receive_all(&client).await[filled..], *b"answer");
        assert_eq!(leased_bytes(), leased);

        let (server, client, filled) = full_pair().await;
        assert_eq!(server.try_send_copy(b"answer", false).unwrap(), 6);
        turns(2).await;
        drop(server);
        assert_eq!(receive_all(&client).await[filled..], *b"answer");

        for waits in [false, true] {
            let (server, client, filled) = full_pair().await;
            assert_eq!(server.try_send(&mut chunks_of(b"in chunks"), false).unwrap(), 9);
            turns(if waits { 2 } else { 0 }).await;
            drop(server);
            assert_eq!(receive_all(&client).await[filled..], *b"in chunks", "waits: {waits}");
        }
        assert_eq!(leased_bytes(), leased);
    });
}

#[test]
fn all_sent_waits_for_the_last_bytes_of_closed_connections() {
    let sends = sends_on_ring();
    event_loop(simulated_time()).run(async {
        all_sent().await;
        let mut peers = Vec::new();
        for _ in 0..2 {
            let (server, client, filled) = full_pair().await;
            let taken = server.try_send_copy(b"answer", false).unwrap();
            peers.push((client, filled + taken));
        }
        turns(2).await;
        let mut sent = Box::pin(all_sent());
        if sends {
            assert!(poll_once(&mut sent).await.is_pending(), "two have something to come");
        }
        // One peer reads it, and one leaves.
        let (client, length) = peers.pop().unwrap();
        assert_eq!(receive_all(&client).await.len(), length);
        if sends {
            assert!(poll_once(&mut sent).await.is_pending(), "one has something to come");
        }
        drop(peers);
        timeout(Duration::from_secs(1), sent).await.expect("nobody is left");
    });
}

#[test]
fn the_oldest_of_too_many_that_wait_to_be_closed_gives_way() {
    if !sends_on_ring() {
        return;
    }
    event_loop(simulated_time()).run(async {
        let mut clients = Vec::new();
        for _ in 0..140 {
            let (server, client, filled) = full_pair().await;
            assert_eq!(server.try_send_copy(b"answer", false).unwrap(), 6);
            drop(server);
            clients.push((client, filled));
        }
        turns(2).await;
        let (oldest, filled) = clients.remove(0);
        assert_eq!(receive_all(&oldest).await.len(), filled);
        let (newest, filled) = clients.pop().unwrap();
        assert_eq!(receive_all(&newest).await.len(), filled + 6);
    });
}

/// Both ends of a connection on the ring, the first of which is full, and the number of bytes that the second can
/// receive.
async fn full_pair() -> (Stream, Stream, usize) {
    let (server, client) = unix_pair();
    warm_up(&server, &client).await;
    let mut filled = 0;
    for length in [64 * 1024, 1] {
        while let Ok(written) = rustix::io::write(&server, &vec![7; length]) {
            filled += written;
        }
    }
    (server, client, filled)
}

#[test]
fn reset_drops_fire_and_forget_sends() {
    if !sends_on_ring() {
        return;
    }
    event_loop(simulated_time()).run(async {
        let (server, client) = tcp_pair().await;
        warm_up(&server, &client).await;
        assert_eq!(server.try_send_copy(b"never", false).unwrap(), 5);
        server.set_linger_reset().unwrap();
        drop(server);
        let mut input = Buffer::new();
        assert_eq!(client.recv(&mut input, 100).await.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    });
}

#[test]
fn reader_gives_up_a_peer_that_cannot_be_answered() {
    event_loop(simulated_time()).run(async {
        for waits in [false, true] {
            let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
            let (server, mut client) = (Stream::from_fd(near.into()).unwrap(), far);
            for _ in 0..3 {
                let mut received = Box::pin(receive(&server, 4));
                assert!(poll_once(&mut received).await.is_pending());
                client.write_all(b"warm").unwrap();
                assert_eq!(received.await, b"warm");
            }
            let mut input = Buffer::new();
            let mut received = Box::pin(server.recv(&mut input, 100));
            if waits {
                assert!(poll_once(&mut received).await.is_pending());
                turns(1).await;
            }
            // An event that no receive would report.
            client.shutdown(std::net::Shutdown::Read).unwrap();
            match server.try_send_copy(b"answer", false) {
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe),
                Ok(0) => assert!(!sends_on_ring()),
                Ok(_) => {
                    let told = timeout(Duration::from_secs(1), received).await.expect("nobody knows");
                    assert_eq!(told.unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
                    timeout(Duration::from_secs(1), server.peer_closed()).await.expect("it has gone");
                }
            }
        }
    });
}

#[test]
fn stream_that_moves_has_finished_fire_and_forget_sends() {
    event_loop(simulated_time()).run(async {
        let (server, client) = tcp_pair().await;
        warm_up(&server, &client).await;
        assert_eq!(server.try_send_copy(b"answer", false).unwrap(), 6);
        let server = server.detach().unwrap().attach();
        drop(server);
        assert_eq!(receive_all(&client).await, b"answer");
    });
}

/// Sends all of `output` in a task of its own, which then closes the stream; the cell tells whether that succeeded.
fn spawn_sending(stream: Stream, mut output: Output) -> Rc<Cell<bool>> {
    let is_sent = Rc::new(Cell::new(false));
    let result = Rc::clone(&is_sent);
    spawn(async move { result.set(stream.send_all(&mut output).await.is_ok()) });
    is_sent
}

/// Everything received until the end of the stream.
async fn receive_all(stream: &Stream) -> Vec<u8> {
    let mut input = Buffer::new();
    let mut received = Vec::new();
    while stream.recv(&mut input, 64 * 1024).await.unwrap() > 0 {
        received.extend_from_slice(input.readable());
        input.clear();
    }
    received
}

#[test]
fn closing_ends_the_connection_although_a_receive_was_armed() {
    event_loop(simulated_time()).run(async {
        for _ in 0..20 {
            let (server, client) = tcp_pair().await;
            warm_up(&server, &client).await;
            let mut input = Buffer::new();
            assert!(poll_once(&mut Box::pin(server.recv(&mut input, 100))).await.is_pending());
            yield_now().await;
            drop(server);
            assert_eq!(client.recv(&mut input, 10).await.unwrap(), 0);
        }
    });
}

#[test]
fn an_ended_loop_has_let_go_of_its_sockets() {
    let client = event_loop(simulated_time()).run(async {
        let (near, client) = std::os::unix::net::UnixStream::pair().unwrap();
        let server = Stream::from_fd(near.into()).unwrap();
        spawn(async move {
            let mut input = Buffer::new();
            let _ = server.recv(&mut input, 100).await;
        });
        for _ in 0..3 {
            yield_now().await;
        }
        client
    });
    // The socket is closed when the kernel has cancelled the receive, which was before the loop was dropped.
    client.set_nonblocking(true).unwrap();
    assert_eq!((&client).read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn stream_closed_in_the_last_turn_is_closed_with_the_loop() {
    for kernel_max in [None, Some((5, 19)), Some((5, 17)), Some((5, 13))] {
        let (near, mut client) = std::os::unix::net::UnixStream::pair().unwrap();
        event_loop(with_ring(RingOptions { kernel_max, ..RingOptions::default() })).run(async {
            drop(Stream::from_fd(near.into()).unwrap());
        });
        client.set_nonblocking(true).unwrap();
        assert_eq!(client.read(&mut [0; 1]).expect("closed"), 0, "{kernel_max:?}");
    }
}

#[test]
fn a_slow_consumer_stops_the_sender() {
    event_loop(simulated_time()).run(async {
        let (server, client) = unix_pair();
        warm_up(&server, &client).await;
        let mut input = Buffer::new();
        assert!(poll_once(&mut Box::pin(server.recv(&mut input, 100))).await.is_pending());
        let mut output = Output::new();
        output.push(Bytes::from(vec![7; 64 << 20]));
        let sent = timeout(Duration::from_secs(1), client.send_all(&mut output)).await;
        assert_eq!(sent.unwrap_err(), Elapsed);
        assert!(output.len_bytes() > 60 << 20, "nobody read");
        // From 6.17 on the kernel ends the receive itself; before, it may fill all buffers until it sees the
        // cancellation.
        let bound = if kernel_has(6, 17) || !is_there() { 16 * 1024 } else { 1 << 20 };
        assert!(leased_bytes() <= bound, "{} bytes", leased_bytes());
    });
}

#[test]
fn this_kernel_is_used_as_it_should() {
    if !is_there() {
        return skip("no io_uring here");
    }
    // More loops on one thread than fit its table of rings.
    let loops: Vec<_> = (0..20).map(|_| event_loop(simulated_time())).collect();
    assert!(loops.iter().all(|event_loop| event_loop.driver_name() == "io_uring"));
}

#[test]
fn rings_work_the_same_with_features_of_older_kernels() {
    run_as_on_older_kernels(&[]);
}
