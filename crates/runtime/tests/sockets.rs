//! Sockets on the real kernel: order of bytes, waiting, closing, slots.

pub(crate) mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::cell::{Cell, RefCell};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use common::*;
use gale_runtime::*;

/// Echoes everything until the end of the stream.
async fn echo(stream: Stream) {
    let (mut input, mut output) = (Buffer::new(), Output::new());
    while stream.recv(&mut input, 1000).await.unwrap() > 0 {
        output.push(input.take_lease().unwrap());
        stream.send_all(&mut output).await.unwrap();
    }
}

async fn serve_echo(listener: Listener) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        spawn(echo(stream));
    }
}

#[test]
fn echo_over_tcp() {
    run(async {
        let listener = Listener::bind(&any_port(), 16, AcceptOptions::default()).unwrap();
        let address = listener.local_address().unwrap();
        spawn(serve_echo(listener));
        for _ in 0..3 {
            let client = Stream::connect(&address).await.unwrap();
            assert_eq!(client.peer_address().unwrap(), address);
            for _ in 0..3 {
                send(&client, b"hello, gale").await;
                assert_eq!(receive(&client, 11).await, b"hello, gale");
            }
        }
    });
}

#[test]
fn echo_over_unix_sockets() {
    run(async {
        let directory = Directory::new();
        let address = SocketAddress::unix(directory.path("echo.sock"));
        let listener = Listener::bind(&address, 16, AcceptOptions::default()).unwrap();
        assert_eq!(listener.local_address().unwrap(), address);
        spawn(serve_echo(listener));
        let client = Stream::connect(&address).await.unwrap();
        send(&client, b"hello").await;
        assert_eq!(receive(&client, 5).await, b"hello");
        assert_eq!(client.local_address().unwrap(), SocketAddress::Unix(None));
    });
}

#[test]
fn an_accepted_stream_comes_with_its_peers_address() {
    run(async {
        let listener = Listener::bind(&any_port(), 16, AcceptOptions::default()).unwrap();
        let client = Stream::connect(&listener.local_address().unwrap()).await.unwrap();
        let (server, peer) = listener.accept().await.unwrap();
        assert_eq!(peer, client.local_address().unwrap());
        assert_eq!(server.local_address().unwrap(), client.peer_address().unwrap());
    });
}

#[test]
fn port_without_listener_refuses() {
    run(async {
        let listener = Listener::bind(&any_port(), 1, AcceptOptions::default()).unwrap();
        let address = listener.local_address().unwrap();
        drop(listener);
        let error = Stream::connect(&address).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        let missing = SocketAddress::unix("/nonexistent/socket");
        assert_eq!(Stream::connect(&missing).await.unwrap_err().kind(), ErrorKind::NotFound);
    });
}

#[test]
fn short_sends_to_a_slow_reader_keep_order_and_bytes() {
    let sent = pattern(8 << 20);
    run(async {
        for (writer, reader) in [tcp_pair().await, unix_pair()] {
            rustix::net::sockopt::set_socket_send_buffer_size(writer.as_fd(), 100_000).unwrap();
            let mut output = Output::new();
            for piece in sent.chunks(70_001) {
                output.push(Bytes::copy_from_slice(piece));
            }
            let waits = Rc::new(Cell::new(0));
            let seen = Rc::clone(&waits);
            spawn(async move {
                while !output.is_empty() {
                    let before = output.len_bytes();
                    let count = writer.send(&mut output).await.unwrap();
                    assert_eq!(output.len_bytes(), before - count);
                    seen.set(seen.get() + 1);
                }
            });
            let mut input = Buffer::new();
            let mut received = Vec::new();
            // Small reads with a pause each: the writer finds the socket full again and again.
            while reader.recv(&mut input, 60_000).await.unwrap() > 0 {
                received.extend_from_slice(input.readable());
                input.clear();
                yield_now().await;
            }
            assert!(received == sent, "{} of {} bytes, or not the same", received.len(), sent.len());
            assert!(waits.get() > 20, "the socket was never full");
        }
    });
}

#[test]
fn many_small_chunks_leave_in_few_calls_and_in_order() {
    run(async {
        let (writer, reader) = unix_pair();
        let mut output = Output::new();
        let sent = pattern(1000);
        for piece in sent.chunks(5) {
            output.push(Bytes::copy_from_slice(piece));
        }
        assert_eq!(writer.send(&mut output).await.unwrap(), 320, "64 chunks at once");
        writer.send_all(&mut output).await.unwrap();
        assert_eq!(receive(&reader, 1000).await, sent);
    });
}

#[test]
fn head_sent_with_more_arrives_with_the_next_bytes() {
    run(async {
        let (server, client) = tcp_pair().await;
        let mut output = Output::new();
        output.set_more_follows(true);
        output.push(b"head ");
        server.send_all(&mut output).await.unwrap();
        output.set_more_follows(false);
        output.push(b"and body");
        server.send_all(&mut output).await.unwrap();
        assert_eq!(receive(&client, 13).await, b"head and body");
    });
}

#[test]
fn a_waiting_receive_holds_no_memory_and_dropping_it_loses_nothing() {
    run(async {
        let (server, client) = tcp_pair().await;
        let mut input = Buffer::new();
        {
            let mut waiting = Box::pin(server.recv(&mut input, 4096));
            assert!(poll_once(&mut waiting).await.is_pending());
        }
        assert_eq!((input.capacity(), leased_bytes()), (0, 0));
        send(&client, b"after the drop").await;
        assert_eq!(receive(&server, 14).await, b"after the drop");
        // Dropped again while data is on its way.
        send(&client, b"more").await;
        let elapsed = timeout(Duration::ZERO, std::future::pending::<()>()).await;
        assert_eq!(elapsed, Err(Elapsed));
        assert_eq!(receive(&server, 4).await, b"more");
    });
}

#[test]
fn data_that_arrives_after_a_short_read_wakes_the_reader() {
    run(async {
        let (server, client) = tcp_pair().await;
        for round in 0..100u8 {
            let reader = async { receive(&server, 3).await };
            let mut reader = Box::pin(reader);
            if round % 2 == 0 {
                assert!(poll_once(&mut reader).await.is_pending());
            }
            send(&client, b"abc").await;
            assert_eq!(reader.await, b"abc");
        }
    });
}

#[test]
fn the_end_of_the_stream_is_found_after_a_short_read_that_overtook_its_event() {
    run(async {
        let (server, client) = tcp_pair().await;
        let mut input = Buffer::new();
        {
            // Registered by waiting once.
            let mut waiting = Box::pin(server.recv(&mut input, 10));
            assert!(poll_once(&mut waiting).await.is_pending());
        }
        send(&client, b"last").await;
        client.shutdown_write().unwrap();
        assert_eq!(receive(&server, 4).await, b"last");
        assert_eq!(server.recv(&mut input, 10).await.unwrap(), 0);
        assert_eq!(server.recv(&mut input, 10).await.unwrap(), 0, "and again");
        // Only half-closed: the other direction still works.
        send(&server, b"answer").await;
        assert_eq!(receive(&client, 6).await, b"answer");
    });
}

#[test]
fn the_peers_leaving_is_noticed_without_reading() {
    run(async {
        for (server, client) in [tcp_pair().await, unix_pair()] {
            let mut left = Box::pin(server.peer_closed());
            assert!(poll_once(&mut left).await.is_pending());
            send(&client, b"unread").await;
            yield_now().await;
            assert!(poll_once(&mut left).await.is_pending(), "data is not an end");
            drop(client);
            left.await;
            assert_eq!(receive(&server, 6).await, b"unread");
        }
    });
}

#[test]
fn a_reset_is_an_error_to_reader_and_writer() {
    run(async {
        let (server, client) = tcp_pair().await;
        let mut input = Buffer::new();
        {
            let mut waiting = Box::pin(server.recv(&mut input, 10));
            assert!(poll_once(&mut waiting).await.is_pending());
        }
        client.set_linger_reset().unwrap();
        drop(client);
        assert_eq!(server.recv(&mut input, 10).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
        let mut output = Output::new();
        output.push(b"too late");
        assert_eq!(server.send_all(&mut output).await.unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert_eq!(output.len_bytes(), 8);
    });
}

#[test]
fn one_task_reads_while_another_writes() {
    run(async {
        let (server, client) = tcp_pair().await;
        let server = Rc::new(server);
        let reading = Rc::clone(&server);
        let received = Rc::new(RefCell::new(Vec::new()));
        let into = Rc::clone(&received);
        spawn(async move {
            let bytes = receive(&reading, 4).await;
            into.borrow_mut().extend(bytes);
        });
        let mut output = Output::new();
        output.push(Bytes::from(pattern(4 << 20)));
        spawn(async move { server.send_all(&mut output).await.unwrap() });
        yield_now().await;
        send(&client, b"ping").await;
        yield_now().await;
        yield_now().await;
        assert_eq!(*received.borrow(), b"ping", "while the writer waits for room");
        assert_eq!(receive(&client, 4 << 20).await, pattern(4 << 20));
    });
}

#[test]
fn a_stale_event_does_not_reach_the_slots_next_owner() {
    run(async {
        let (old, old_peer) = unix_pair();
        let mut input = Buffer::new();
        {
            let mut waiting = Box::pin(old.recv(&mut input, 10));
            assert!(poll_once(&mut waiting).await.is_pending());
        }
        // The duplicate keeps the registration alive after the stream was dropped.
        let duplicate = old.as_fd().try_clone_to_owned().unwrap();
        drop(old);
        let (new, new_peer) = unix_pair();
        let woken = Rc::new(Cell::new(0));
        let count = Rc::clone(&woken);
        spawn(async move {
            let mut input = Buffer::new();
            std::future::poll_fn(|cx| {
                count.set(count.get() + 1);
                new.poll_recv(cx, &mut input, 10)
            })
            .await
            .unwrap();
            assert_eq!(input.readable(), b"mine");
            count.set(100);
        });
        yield_now().await;
        send(&old_peer, b"stale").await;
        yield_now().await;
        yield_now().await;
        assert_eq!(woken.get(), 1, "only the first poll");
        send(&new_peer, b"mine").await;
        yield_now().await;
        yield_now().await;
        assert_eq!(woken.get(), 100);
        drop(duplicate);
    });
}

#[test]
fn a_stream_moves_to_another_loop_with_its_data() {
    let (detached, mut client) = run(async {
        let listener = Listener::bind(&any_port(), 16, AcceptOptions::default()).unwrap();
        let address = listener.local_address().unwrap().inet().unwrap();
        let mut client = std::net::TcpStream::connect(address).unwrap();
        let (server, _) = listener.accept().await.unwrap();
        let mut input = Buffer::new();
        {
            let mut waiting = Box::pin(server.recv(&mut input, 10));
            assert!(poll_once(&mut waiting).await.is_pending());
        }
        client.write_all(b"between").unwrap();
        (server.detach().unwrap(), client)
    });
    let other = std::thread::spawn(move || {
        run_real(async move {
            let server = detached.attach();
            assert_eq!(receive(&server, 7).await, b"between");
            send(&server, b"arrived").await;
        })
    });
    other.join().unwrap();
    let mut answer = [0; 7];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"arrived");
}

#[test]
fn a_shared_listener_accepts_at_most_its_batch_per_turn() {
    run(async {
        let options = AcceptOptions { exclusive: true, batch: 2 };
        let listener = Listener::bind(&any_port(), 128, options).unwrap();
        assert_eq!(accepted_per_turn(&listener, 5).await, [2, 2, 1]);
    });
}

#[test]
fn a_listener_of_one_loop_accepts_more_while_its_queue_is_long() {
    run(async {
        let options = AcceptOptions { exclusive: false, batch: 1 };
        let listener = Listener::bind(&any_port(), 128, options).unwrap();
        assert_eq!(accepted_per_turn(&listener, 20).await, [8, 8, 4]);
        for _ in 0..10 {
            assert_eq!(accepted_per_turn(&listener, 1).await, [1]);
        }
        assert_eq!(accepted_per_turn(&listener, 3).await, [1, 1, 1], "the last ten found the queue empty");
        assert!(accepted_per_turn(&listener, 100).await.contains(&8), "in the end it is found long");
    });
}

/// Connects `clients` clients; returns the number of accepts in each turn with any.
async fn accepted_per_turn(listener: &Listener, clients: usize) -> Vec<usize> {
    let address = listener.local_address().unwrap().inet().unwrap();
    let _clients: Vec<_> = (0..clients).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
    let mut batches = Vec::new();
    while batches.iter().sum::<usize>() < clients {
        let mut accepted = 0;
        let mut accept = Box::pin(listener.accept());
        while poll_once(&mut accept).await.is_ready() {
            accepted += 1;
            accept = Box::pin(listener.accept());
        }
        batches.push(accepted);
        yield_now().await;
    }
    batches.retain(|&accepted| accepted > 0);
    batches
}

#[test]
fn listener_gives_connections_beyond_its_batch_without_waiting() {
    run(async {
        let listener = Listener::bind(&any_port(), 16, AcceptOptions::default()).unwrap();
        let address = listener.local_address().unwrap().inet().unwrap();
        assert!(listener.try_accept().unwrap().is_none());
        let clients: Vec<_> = (0..3).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
        for client in &clients {
            let (_stream, peer) = listener.try_accept().unwrap().expect("it is connected");
            assert_eq!(peer.inet(), Some(client.local_addr().unwrap()));
        }
        assert!(listener.try_accept().unwrap().is_none());
    });
}

#[test]
fn a_paused_listener_does_not_spin_and_accepts_later() {
    let mut event_loop = event_loop(simulated_time());
    let remote = event_loop.remote();
    event_loop.run(async move {
        let listener = Listener::bind(&any_port(), 16, AcceptOptions::default()).unwrap();
        let address = listener.local_address().unwrap().inet().unwrap();
        let _first = std::net::TcpStream::connect(address).unwrap();
        listener.accept().await.unwrap();
        let _second = std::net::TcpStream::connect(address).unwrap();
        let _third = std::net::TcpStream::connect(address).unwrap();
        let before = remote.turns().count();
        sleep(Duration::from_secs(60)).await;
        assert!(remote.turns().count() - before < 10, "the loop was kept awake");
        listener.accept().await.unwrap();
        listener.pause();
        listener.accept().await.unwrap();
    });
}

/// The accepting task is woken in one turn, runs in a later one, and gets events of connections in between.
#[test]
fn accepting_goes_on_beside_more_tasks_than_two_turns_run() {
    const CLIENTS: usize = 20;
    run(async {
        let listener = Listener::bind(&any_port(), 128, AcceptOptions::default()).unwrap();
        let address = listener.local_address().unwrap().inet().unwrap();
        for _ in 0..3000 {
            spawn(async {
                loop {
                    yield_now().await;
                }
            });
        }
        let accepted = Rc::new(Cell::new(0));
        let count = Rc::clone(&accepted);
        spawn(async move {
            while count.get() < CLIENTS {
                let _stream = listener.accept().await.unwrap();
                count.set(count.get() + 1);
            }
        });
        let _clients: Vec<_> = (0..CLIENTS).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
        let mut turns = 0;
        while accepted.get() < CLIENTS {
            turns += 1;
            assert!(turns < 1000, "{} of {CLIENTS} were accepted", accepted.get());
            yield_now().await;
        }
    });
}

#[test]
fn several_loops_share_one_listening_socket() {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let socket = std::sync::Arc::new(std::os::fd::OwnedFd::from(socket));
    let loops: Vec<_> = (0..2)
        .map(|_| {
            let socket = std::sync::Arc::clone(&socket);
            let (sender, receiver) = std::sync::mpsc::channel();
            let thread = std::thread::spawn(move || {
                let mut event_loop = event_loop(options());
                let remote = event_loop.remote();
                event_loop.run(async move {
                    let options = AcceptOptions { exclusive: true, batch: 4 };
                    let listener = Listener::from_fd(socket, options).unwrap();
                    spawn(serve_echo(listener));
                    let (stop, mut stopped) = stop_switch();
                    sender.send((remote, stop)).unwrap();
                    stopped.wait().await;
                });
            });
            (thread, receiver.recv().unwrap())
        })
        .collect();
    for _ in 0..50 {
        let mut client = std::net::TcpStream::connect(address).unwrap();
        client.write_all(b"hello").unwrap();
        let mut answer = [0; 5];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"hello");
    }
    for (thread, (_remote, stop)) in loops {
        stop();
        thread.join().unwrap();
    }
}

#[test]
fn a_loop_that_is_told_of_a_connection_and_does_not_accept_passes_it_on() {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let socket = std::sync::Arc::new(std::os::fd::OwnedFd::from(socket));
    let exclusive = AcceptOptions { exclusive: true, batch: 1 };
    let (sender, receiver) = std::sync::mpsc::channel();
    let shared = std::sync::Arc::clone(&socket);
    let first = std::thread::spawn(move || {
        event_loop(options()).run(async move {
            let listener = Listener::from_fd(shared, exclusive).unwrap();
            // Accepts once and then waits for something else.
            assert!(poll_once(&mut Box::pin(listener.accept())).await.is_pending());
            let (stop, mut stopped) = stop_switch();
            sender.send(stop).unwrap();
            stopped.wait().await;
        });
    });
    let stop = receiver.recv().unwrap();
    run_real(async {
        let listener = Listener::from_fd(socket, exclusive).unwrap();
        let mut accepted = Box::pin(listener.accept());
        assert!(poll_once(&mut accepted).await.is_pending());
        // The kernel notifies those first that wait longest.
        let client = std::thread::spawn(move || std::net::TcpStream::connect(address).unwrap());
        timeout(Duration::from_secs(20), accepted).await.expect("nobody accepted").unwrap();
        client.join().unwrap();
    });
    stop();
    first.join().unwrap();
}

/// A switch for another thread, and the future that waits for it.
fn stop_switch() -> (Box<dyn FnOnce() + Send>, StopSwitch) {
    let pool = ThreadPool::new("switch", 1, 1);
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    let task = pool.run(move || {
        let _ = receiver.recv();
    });
    (Box::new(move || drop(sender)), StopSwitch { task })
}

struct StopSwitch {
    task: PoolTask<()>,
}

impl StopSwitch {
    async fn wait(&mut self) {
        (&mut self.task).await.unwrap();
    }
}

#[test]
fn a_connection_that_always_has_data_yields_to_the_others() {
    run(async {
        let (flooded, flooding) = unix_pair();
        let (quiet, quiet_peer) = unix_pair();
        spawn(async move {
            let mut output = Output::new();
            loop {
                output.push(&[0; 4096]);
                flooding.send_all(&mut output).await.unwrap();
            }
        });
        spawn(async move {
            let mut input = Buffer::new();
            // One byte at a time: there is always more to read.
            while flooded.recv(&mut input, 1).await.unwrap() > 0 {
                input.clear();
            }
        });
        for _ in 0..100 {
            send(&quiet_peer, b"quiet").await;
            assert_eq!(receive(&quiet, 5).await, b"quiet");
        }
    });
}

#[test]
fn at_the_hard_limit_of_leases_a_receive_fails_and_works_again_later() {
    let options = LoopOptions { leased_bytes_max: Some(4096), ..simulated_time() };
    let work = move || {
        event_loop(options).run(async {
            let (server, client) = unix_pair();
            send(&client, b"data").await;
            let held = [Lease::new(4096).unwrap(), Lease::new(1).unwrap()];
            assert!(leases_exhausted());
            let mut input = Buffer::new();
            assert_eq!(server.recv(&mut input, 100).await.unwrap_err().kind(), ErrorKind::OutOfMemory);
            drop(held);
            assert_eq!(receive(&server, 4).await, b"data");
        });
    };
    std::thread::spawn(work).join().unwrap();
}
