//! The simulated world itself: with any faults bytes arrive whole and in order, the same seed gives the same run, and
//! the kernel's promises are kept.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use gale_files::{self as files, *};
use gale_runtime::simulation::{
    Faults, FileFaults, Peer, PeerEnd, Random, Reading, Sending, Simulation, Transcript, each_seed,
};
use gale_runtime::*;

/// `simulation_io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: DriverChoice = DriverChoice::Epoll;

/// Default number of seeds of each test.
const SEEDS: u64 = 40;

fn address() -> SocketAddress {
    SocketAddress::Inet("192.0.2.1:80".parse().unwrap())
}

fn pattern(length: usize) -> Bytes {
    (0..length as u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect::<Vec<u8>>().into()
}

fn run<T>(simulation: &Simulation, main: impl Future<Output = T>) -> T {
    let options = LoopOptions { driver: crate::DRIVER, ..LoopOptions::default() };
    EventLoop::simulated(simulation, options).unwrap().run(main)
}

/// Runs without faults.
fn run_quiet<T>(main: impl Future<Output = T>) -> T {
    run(&Simulation::new(1, Faults::NONE), main)
}

/// The accepted end of a connection, and the client's.
async fn pair() -> (Stream, Stream) {
    pair_at("192.0.2.1:80").await
}

async fn pair_at(address: &str) -> (Stream, Stream) {
    let address = SocketAddress::Inet(address.parse().unwrap());
    let listener = Listener::bind(&address, 16, AcceptOptions::default()).unwrap();
    let client = spawn_with_result(Stream::connect(&address));
    let server = loop {
        match listener.accept().await {
            Ok((server, _)) => break server,
            Err(_) => sleep(Duration::from_millis(5)).await,
        }
    };
    (server, client.take().await.unwrap())
}

/// A task with a result that can be awaited.
struct Task<T>(Rc<RefCell<Option<T>>>);

impl<T> Task<T> {
    async fn take(self) -> T {
        loop {
            let result = self.0.borrow_mut().take();
            match result {
                Some(result) => return result,
                None => sleep(Duration::from_millis(1)).await,
            }
        }
    }
}

fn spawn_with_result<T: 'static>(future: impl Future<Output = T> + 'static) -> Task<T> {
    let slot = Rc::new(RefCell::new(None));
    let result = Rc::clone(&slot);
    spawn(async move {
        let value = future.await;
        *result.borrow_mut() = Some(value);
    });
    Task(slot)
}

async fn echo(stream: Stream) {
    let (mut input, mut output) = (Buffer::new(), Output::new());
    while let Ok(1..) = stream.recv(&mut input, 3000).await {
        output.push(input.take_lease().unwrap());
        if stream.send_all(&mut output).await.is_err() {
            return;
        }
    }
}

fn serve_echo() {
    let listener = Listener::bind(&address(), 64, AcceptOptions::default()).unwrap();
    spawn(async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => drop(spawn(echo(stream))),
                Err(_) => sleep(Duration::from_millis(5)).await,
            }
        }
    });
}

async fn echoed(random: Random, length: usize) -> io::Result<(Bytes, Transcript)> {
    let bytes = pattern(length);
    let piece_max = random.up_to(length);
    let sends = vec![Sending::Pieces(bytes.clone(), piece_max, Duration::from_millis(3)), Sending::ShutDown];
    let reads = match random.below(3) {
        0 => Reading::Slowly(2000, Duration::from_millis(2)),
        _ => Reading::Eagerly,
    };
    let stream = Stream::connect(&address()).await?;
    let transcript = Peer { reads, ..Peer::new(sends) }.play(stream, &random).await;
    Ok((bytes, transcript))
}

#[test]
fn bytes_come_back_whole_and_in_order_despite_faults() {
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        simulation.set_faults(Faults::swarm(&random));
        run(simulation, async {
            serve_echo();
            let clients: Vec<_> = (0..random.up_to(8))
                .map(|_| spawn_with_result(echoed(random.fork(), random.fork().up_to(60_000))))
                .collect();
            for client in clients {
                let (sent, transcript) = client.take().await.unwrap();
                assert_eq!(transcript.end, PeerEnd::Closed);
                assert!(sent == transcript.received, "{} of {} bytes", transcript.received.len(), sent.len());
            }
            sleep(Duration::from_secs(5)).await;
            assert_eq!((simulation.open_ends(), task_count(), leased_bytes()), (0, 1, 0));
        });
    });
}

#[test]
fn waits_without_taking_end_with_bytes_room_and_end() {
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        simulation.set_faults(Faults { cuts: 0, connect_failures: 0, ..Faults::swarm(&random) });
        run(simulation, async {
            let (server, client) = pair().await;
            let sent = pattern(random.up_to(60_000));
            let to_send = sent.clone();
            let sender = spawn_with_result(async move {
                let mut output = Output::new();
                output.push(to_send);
                while !output.is_empty() {
                    poll_fn(|cx| client.poll_writable(cx)).await.unwrap();
                    client.send(&mut output).await.unwrap();
                }
            });
            let mut input = Buffer::new();
            loop {
                poll_fn(|cx| server.poll_readable(cx)).await.unwrap();
                if server.recv(&mut input, 1 + random.up_to(10_000)).await.unwrap() == 0 {
                    break;
                }
            }
            sender.take().await;
            assert!(input.readable() == &sent[..]);
        });
    });
}

/// Echoes datagrams, each from the address that it was sent to.
async fn echo_datagrams(socket: Datagram) {
    let mut batch = ReceiveBatch::new(8, 1 << 12);
    loop {
        socket.recv_batch(&mut batch).await.unwrap();
        let answers: Vec<_> = (batch.iter())
            .map(|(one, bytes)| Transmit {
                source: one.local,
                ecn: one.ecn,
                segment_bytes: Some(one.stride as u16),
                may_join: true,
                ..Transmit::to(&one.source, bytes)
            })
            .collect();
        let mut sent = 0;
        while sent < answers.len() {
            poll_fn(|cx| socket.poll_send_ready(cx)).await.unwrap();
            sent += socket.try_send_batch(&answers[sent..]).unwrap();
        }
    }
}

#[test]
fn datagrams_come_back_whole_from_the_address_that_was_asked() {
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        simulation.set_faults(Faults::swarm(&random));
        run(simulation, async {
            let options = DatagramOptions {
                local: Some("0.0.0.0:53".parse::<std::net::SocketAddr>().unwrap().into()),
                local_address: true,
                ecn: true,
                gro: random.below(2) == 0,
                ..DatagramOptions::default()
            };
            spawn(echo_datagrams(options.open().unwrap()));
            for host in 1..4u8 {
                let asked = std::net::SocketAddr::from(([192, 0, 2, host], 53)).into();
                let client = DatagramOptions { peer: Some(asked), ecn: true, ..DatagramOptions::default() };
                let client = client.open().unwrap();
                let count = random.up_to(40);
                // All are different: their first two bytes are their number.
                let sent: Vec<Vec<u8>> =
                    (0..count as u16).map(|number| [&number.to_be_bytes()[..], &pattern(100)].concat()).collect();
                let contents = sent.concat();
                let transmit =
                    Transmit { segment_bytes: Some(102), ecn: Some(Ecn::Ect0), ..Transmit::to_peer(&contents) };
                assert_eq!(client.try_send_batch(&[transmit]).unwrap(), 1);
                let mut back = Vec::new();
                let mut batch = ReceiveBatch::new(4, 200);
                while back.len() < count {
                    client.recv_batch(&mut batch).await.unwrap();
                    assert!(batch.iter().all(|(one, _)| one.ecn == Some(Ecn::Ect0)));
                    back.extend(batch.iter().map(|(_, bytes)| bytes.to_vec()));
                }
                back.sort();
                assert_eq!(back, sent);
            }
        });
    });
}

#[test]
fn idle_streams_are_taken_whole_or_closed() {
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        simulation.set_faults(Faults::swarm(&random));
        run(simulation, async {
            serve_echo();
            let limits = IdleOptions { loops: 1, per_loop_max: 2, timeout: Duration::from_secs(60) };
            let streams = IdleStreams::new(limits);
            for round in 0..20 {
                let stream = match streams.take(&1) {
                    Some((stream, ())) => stream,
                    None => Stream::connect(&address()).await.unwrap(),
                };
                // At most two of the smallest windows: everything is sent before any of its echo is received.
                let sent = pattern(random.up_to(900));
                let (mut input, mut output) = (Buffer::new(), Output::new());
                output.push(sent.clone());
                stream.send_all(&mut output).await.unwrap();
                while input.len() < sent.len() {
                    assert_ne!(stream.recv(&mut input, 5000).await.unwrap(), 0);
                }
                assert!(input.readable() == &sent[..]);
                streams.park(1, stream, ());
                match round % 5 {
                    // Longer than the idle timeout.
                    0 => sleep(Duration::from_secs(61)).await,
                    1 => {
                        // Closed by the other end.
                        let (server, client) = pair_at(&format!("198.51.100.{round}:80")).await;
                        streams.park(2, client, ());
                        drop(server);
                        sleep(Duration::from_secs(2)).await;
                        assert!(streams.take(&2).is_none());
                    }
                    _ => {}
                }
            }
            drop(streams);
            sleep(Duration::from_secs(5)).await;
            assert_eq!((simulation.open_ends(), task_count(), leased_bytes()), (0, 1, 0));
        });
    });
}

#[test]
fn a_tunnel_passes_everything_on_in_order() {
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        simulation.set_faults(Faults::swarm(&random));
        run(simulation, async {
            let (entry, client) = pair_at("192.0.2.1:80").await;
            let (server, exit) = pair_at("192.0.2.2:80").await;
            spawn(async move {
                let mut splice = Splice::new();
                while poll_fn(|cx| splice.poll_transfer(cx, &entry, &exit)).await.unwrap() > 0 {}
                exit.shutdown_write().unwrap();
            });
            let sent = pattern(random.up_to(100_000));
            let to_send = sent.clone();
            spawn(async move {
                let mut output = Output::new();
                output.push(to_send);
                client.send_all(&mut output).await.unwrap();
                client.shutdown_write().unwrap();
            });
            let mut received = Buffer::new();
            while server.recv(&mut received, 10_000).await.unwrap() > 0 {}
            assert!(received.readable() == &sent[..], "{} of {} bytes", received.len(), sent.len());
        });
    });
}

#[test]
fn broken_connections_give_a_prefix_and_leave_nothing_behind() {
    let mut ends = Vec::new();
    let seen = RefCell::new(&mut ends);
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        let faults = Faults { cuts: 500, cut_within: Duration::from_millis(200), ..Faults::swarm(&random) };
        simulation.set_faults(faults);
        run(simulation, async {
            serve_echo();
            if let Ok((sent, transcript)) = echoed(random.fork(), 30_000).await {
                assert!(sent.starts_with(&transcript.received));
                let is_whole = transcript.end == PeerEnd::Closed && sent.len() == transcript.received.len();
                assert!(is_whole || simulation.was_cut(&transcript.local));
                seen.borrow_mut().push(transcript.end);
            }
            sleep(Duration::from_secs(5)).await;
            assert_eq!((simulation.open_ends(), task_count(), leased_bytes()), (0, 1, 0));
        });
    });
    assert!(ends.contains(&PeerEnd::Reset) || ends.len() < 10, "no seed broke a connection");
}

#[test]
fn a_seed_determines_the_run_and_another_one_gives_another() {
    let hash = |seed| {
        let simulation = Simulation::new(seed, Faults::swarm(&Random::new(seed)));
        run(&simulation, async {
            serve_echo();
            echoed(Random::new(seed), 10_000).await.unwrap();
        });
        simulation.trace_hash()
    };
    assert_eq!(hash(7), hash(7));
    assert_ne!(hash(7), hash(8));
}

#[test]
fn dropping_a_future_at_any_moment_loses_nothing() {
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        simulation.set_faults(Faults::swarm(&random));
        run(simulation, async {
            let (server, client) = pair().await;
            let bytes = pattern(20_000);
            let sent = bytes.clone();
            let impatience = random.fork();
            spawn(async move {
                let mut output = Output::new();
                output.push(sent);
                while !output.is_empty() {
                    // The queue shows in the end what the dropped send has done.
                    let time = Duration::from_micros(impatience.below(30_000));
                    if let Ok(result) = timeout(time, server.send(&mut output)).await {
                        result.unwrap();
                    }
                }
                server.shutdown_write().unwrap();
                server.peer_closed().await;
            });
            let (mut received, mut input) = (Vec::new(), Buffer::new());
            loop {
                let time = Duration::from_micros(random.below(30_000));
                match timeout(time, client.recv(&mut input, random.up_to(5000))).await {
                    Ok(result) if result.as_ref().unwrap() == &0 => break,
                    _ => received.extend(input.readable()),
                }
                input.consume(input.len());
            }
            assert!(received == bytes, "{} of {} bytes", received.len(), bytes.len());
        });
    });
}

#[test]
fn closing_with_unread_bytes_resets() {
    run_quiet(async {
        let (server, client) = pair().await;
        let mut output = Output::new();
        output.push(b"hello");
        client.send_all(&mut output).await.unwrap();
        sleep(Duration::from_millis(1)).await;
        drop(server);
        let mut input = Buffer::new();
        let error = client.recv(&mut input, 10).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert_eq!(client.recv(&mut input, 10).await.unwrap(), 0, "an error is told once");
        output.push(b"more");
        assert_eq!(client.send_all(&mut output).await.unwrap_err().kind(), ErrorKind::BrokenPipe);
    });
}

#[test]
fn bytes_for_a_closed_end_reset_and_earlier_ones_can_be_read() {
    run_quiet(async {
        let (server, client) = pair().await;
        let mut output = Output::new();
        output.push(b"answer");
        server.send_all(&mut output).await.unwrap();
        drop(server);
        output.push(b"too late");
        client.send_all(&mut output).await.unwrap();
        sleep(Duration::from_millis(1)).await;
        let mut input = Buffer::new();
        assert_eq!(client.recv(&mut input, 10).await.unwrap(), 6);
        assert_eq!(client.recv(&mut input, 10).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn half_closing_leaves_the_other_direction_open() {
    run_quiet(async {
        let (server, client) = pair().await;
        client.shutdown_write().unwrap();
        server.peer_closed().await;
        let (mut input, mut output) = (Buffer::new(), Output::new());
        assert_eq!(server.recv(&mut input, 10).await.unwrap(), 0);
        output.push(b"still here");
        server.send_all(&mut output).await.unwrap();
        assert_eq!(client.recv(&mut input, 100).await.unwrap(), 10);
    });
}

#[test]
fn a_sender_waits_while_the_reader_does_not_read() {
    run_quiet(async {
        let (server, client) = pair().await;
        let mut output = Output::new();
        output.push(pattern(1 << 20));
        assert!(timeout(Duration::from_secs(60), server.send_all(&mut output)).await.is_err());
        let waiting = output.len_bytes();
        assert!(waiting > 0 && waiting < 1 << 20);
        let mut input = Buffer::new();
        client.recv(&mut input, 10_000).await.unwrap();
        server.send(&mut output).await.unwrap();
        assert!(output.len_bytes() < waiting);
    });
}

#[test]
fn connecting_fails_without_listener_or_by_chance() {
    run_quiet(async {
        let error = Stream::connect(&address()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    });
    let simulation = Simulation::new(1, Faults { connect_failures: 1000, ..Faults::NONE });
    run(&simulation, async {
        let _listener = Listener::bind(&address(), 16, AcceptOptions::default()).unwrap();
        Stream::connect(&address()).await.unwrap_err();
        simulation.set_faults(Faults::NONE);
        Stream::connect(&address()).await.unwrap();
    });
}

#[test]
fn accepting_fails_for_want_of_descriptors_and_skips_aborted_connections() {
    let simulation = Simulation::new(1, Faults { accept_failures: 1000, ..Faults::NONE });
    run(&simulation, async {
        let listener = Listener::bind(&address(), 16, AcceptOptions::default()).unwrap();
        let first = Stream::connect(&address()).await.unwrap();
        let error = listener.accept().await.unwrap_err();
        assert!([libc::EMFILE, libc::ENFILE].contains(&error.raw_os_error().unwrap()));
        simulation.set_faults(Faults { accept_aborts: 1000, ..Faults::NONE });
        assert!(timeout(Duration::from_secs(1), listener.accept()).await.is_err());
        assert_eq!(first.recv(&mut Buffer::new(), 1).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert!(simulation.was_cut(&first.local_address().unwrap()));
        simulation.set_faults(Faults::NONE);
        let second = Stream::connect(&address()).await.unwrap();
        let (_server, peer) = listener.accept().await.unwrap();
        assert_eq!(peer, second.local_address().unwrap());
    });
}

#[test]
fn stream_moves_with_bytes_received_ahead() {
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        simulation.set_faults(Faults { completions: 1000, ..Faults::swarm(&random) });
        run(simulation, async {
            let (mut server, client) = pair().await;
            spawn(async move {
                let mut output = Output::new();
                output.push(pattern(10_000));
                client.send_all(&mut output).await.unwrap();
                client.peer_closed().await;
            });
            let mut received = Vec::new();
            while received.len() < 10_000 {
                let mut input = Buffer::new();
                let _ = timeout(Duration::from_millis(5), server.recv(&mut input, 700)).await;
                received.extend(input.readable());
                server = server.detach().unwrap().attach();
            }
            assert!(received == pattern(10_000));
        });
    });
}

#[test]
fn files_have_their_contents_by_every_way_of_reading() {
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        simulation.set_faults(Faults::swarm(&random));
        let content = pattern(100_000);
        simulation.add_file("/www/a/b.txt", &content).unwrap();
        run(simulation, async {
            let metadata = files::stat("/www/a".as_ref()).await.unwrap();
            assert!(metadata.is_directory());
            assert_eq!(files::stat("/www/x".as_ref()).await.unwrap_err().kind(), ErrorKind::NotFound);
            let below = files::open("/www/a/b.txt/c".as_ref(), OpenFlags::READ).await.unwrap_err();
            assert_eq!(below.kind(), ErrorKind::NotADirectory);
            let file = files::open("/www/a/b.txt".as_ref(), OpenFlags::READ).await.unwrap();
            assert_eq!(file.metadata().size, 100_000);
            let mut read = Vec::new();
            while read.len() < content.len() {
                let piece = file.read_at(read.len() as u64, 30_000).await.unwrap();
                assert!(!piece.is_empty());
                read.extend(&*piece);
            }
            assert!(read == content && file.read_at(100_000, 10).await.unwrap().is_empty());
        });
    });
}

#[test]
fn broken_files_fail_where_they_are_broken() {
    each_seed(SEEDS, |simulation| {
        simulation.set_faults(Faults::swarm(&Random::new(simulation.seed())));
        let content = pattern(10_000);
        let fails = FileFaults { fails_at: Some(5000), ends_at: None };
        let ends = FileFaults { fails_at: None, ends_at: Some(6000) };
        simulation.add_broken_file("/fails", &content, fails).unwrap();
        simulation.add_broken_file("/ends", &content, ends).unwrap();
        run(simulation, async {
            for (path, good, error) in [("/fails", 5000, Some(libc::EIO)), ("/ends", 6000, None)] {
                let file = files::open(path.as_ref(), OpenFlags::READ).await.unwrap();
                assert_eq!(file.metadata().size, 10_000);
                let mut read = Vec::new();
                let result = loop {
                    match file.read_at(read.len() as u64, 4096).await {
                        Ok(piece) if piece.is_empty() => break None,
                        Ok(piece) => read.extend(&*piece),
                        Err(error) => break error.raw_os_error(),
                    }
                };
                assert_eq!((&read[..], result), (&content[..good], error));
            }
        });
    });
}

/// A file without a name: real, as all written files are, and removed with its last handle.
fn unnamed_file() -> File {
    let file = rustix::fs::memfd_create("written", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    File::from_std(file.into()).unwrap()
}

/// Everything that a reader gets, and the end of the file. Reads that a pool refuses are repeated.
async fn follow(mut reader: GrowingReader) -> (Vec<u8>, GrowingEnd) {
    let mut read = Vec::new();
    loop {
        match reader.read(5000).await {
            Ok(Grown::Piece(piece)) => read.extend(&*piece),
            Ok(Grown::Ended(end)) => return (read, end),
            Err(_) => sleep(Duration::from_millis(1)).await,
        }
    }
}

#[test]
fn written_file_is_whole_for_all_followers_or_fails_for_all() {
    let (stored, refused) = (Cell::new(0), Cell::new(0));
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        let mut faults = Faults::swarm(&random);
        faults.disk_full = *random.pick(&[0, 0, 0, 100]);
        faults.pool_refusals = *random.pick(&[0, 0, 20]);
        simulation.set_faults(faults);
        let content = pattern(200_000);
        run(simulation, async {
            let mut writer = files::Writer::new(unnamed_file(), "/written".as_ref() as &std::path::Path)
                .with_queued_bytes_max(1 + random.below(30_000) as usize);
            let growing = writer.follow();
            let readers: Vec<_> = (0..3).map(|_| spawn_with_result(follow(growing.read_from(0)))).collect();
            let mut rest = content.clone();
            let mut result = Ok(());
            while !rest.is_empty() && result.is_ok() {
                let piece = rest.split_to(random.up_to(20_000).min(rest.len()));
                result = writer.append(piece).await;
                if random.chance(300) {
                    sleep(Duration::from_micros(random.below(3000))).await;
                }
            }
            if result.is_ok() {
                result = writer.flush().await;
            }
            let failed = result.is_err();
            match failed {
                // The pool may refuse to inspect it; the file is whole then, too.
                false => drop(writer.finish().await),
                true => drop(writer),
            }
            let counted = if failed { &refused } else { &stored };
            counted.set(counted.get() + 1);
            for reader in readers {
                let (read, end) = reader.take().await;
                assert_eq!(read, content[..read.len()]);
                match end {
                    GrowingEnd::Complete => assert!(!failed && read.len() == content.len()),
                    GrowingEnd::NoLongerStored(Some(_)) => assert!(failed && read.len() as u64 == growing.written()),
                    other => panic!("{other:?}"),
                }
            }
        });
        assert_eq!(leased_bytes(), 0);
    });
    let is_a_sample = std::env::var_os("GALE_SEED").is_some() || std::env::var_os("GALE_SEEDS").is_some();
    assert!(is_a_sample || stored.get() > 0 && refused.get() > 0, "{} and {}", stored.get(), refused.get());
}

#[test]
fn facts_about_a_real_file_do_not_depend_on_its_inode() {
    const PART: u64 = 64 * 1024;
    const PARTS: u64 = 64;
    // There is room for facts about some parts of both files.
    let known_beside = |real: File| {
        let simulation = Simulation::new(1, Faults { cold_files: 1000, ..Faults::NONE });
        simulation.add_file("/file", &vec![0; (PART * PARTS) as usize]).unwrap();
        run(&simulation, async {
            let file = files::open(Path::new("/file"), OpenFlags::READ).await.unwrap();
            file.note_sent(0, (PART * PARTS) as usize);
            let real = File::from_std(real.as_fd().try_clone_to_owned().unwrap().into()).unwrap();
            real.note_sent(0, (PART * PARTS / 2) as usize);
            let is_known = |part| file.is_resident(part * PART, PART).unwrap();
            (0..PARTS).map(is_known).collect::<Vec<bool>>()
        })
    };
    let files: Vec<File> = (0..20).map(|_| unnamed_file()).collect();
    let first = known_beside(files[0].clone());
    assert!(first.contains(&true) && first.contains(&false), "{first:?}");
    for file in files {
        assert_eq!(known_beside(file), first);
    }
}

/// Begins reads in a pool without a thread for them, so the device is busy until these are dropped.
async fn make_busy(file: &File, pool: &ThreadPool) -> Vec<Task<std::io::Result<()>>> {
    let begin = |number: u64| {
        let read = file.begin_read(pool, number * 1000, 1000, ReadHow::default()).unwrap();
        spawn_with_result(async { read.await.map(drop) })
    };
    let reads = (0..4).map(begin).collect();
    yield_now().await;
    reads
}

#[test]
fn fact_about_a_file_on_a_busy_device_is_enough_for_a_read_and_not_for_sendfile() {
    each_seed(3, |simulation| {
        simulation.add_file("/file", &pattern(1 << 20)).unwrap();
        run(simulation, async {
            let file = files::open(Path::new("/file"), OpenFlags::READ).await.unwrap();
            let sendable = || file.sendfile_length(1 << 19, 1 << 16).unwrap();
            let is_read = || matches!(file.look(1 << 19, 1000).unwrap(), CachedRead::Found(_));
            file.note_sent(0, 1 << 20);
            sleep(Duration::from_millis(500)).await;
            assert_eq!(sendable(), 1 << 16, "half a second old, on a healthy device");
            let pool = ThreadPool::new("simulated", 1, 10);
            let reads = make_busy(&file, &pool).await;
            assert_eq!((sendable(), is_read()), (0, false));
            file.note_sent(0, 1 << 20);
            assert_eq!((sendable(), is_read()), (0, true));
            sleep(Duration::from_millis(40)).await;
            assert_eq!((sendable(), is_read()), (0, false));
            for read in reads {
                read.take().await.unwrap();
            }
        });
    });
}

#[test]
fn page_that_is_missing_is_forgotten_and_shortens_the_time_for_which_others_are_believed() {
    each_seed(3, |simulation| {
        simulation.set_faults(Faults { cold_files: 1000, ..Faults::NONE });
        simulation.add_file("/file", &pattern(1 << 20)).unwrap();
        run(simulation, async {
            let file = files::open(Path::new("/file"), OpenFlags::READ).await.unwrap();
            file.note_sent(0, 1 << 20);
            assert!(matches!(file.look(0, 1 << 16).unwrap(), CachedRead::NotInMemory));
            let sendable = |offset| file.sendfile_length(offset, 1 << 16).unwrap();
            assert_eq!((sendable(0), sendable(1 << 16)), (0, 1 << 16));
            sleep(Duration::from_millis(300)).await;
            assert_eq!(sendable(1 << 16), 0);
        });
    });
}

#[test]
fn a_file_is_sent_as_it_is() {
    each_seed(SEEDS, |simulation| {
        simulation.set_faults(Faults::swarm(&Random::new(simulation.seed())));
        let content = pattern(150_000);
        simulation.add_file("/file", &content).unwrap();
        let broken = FileFaults { fails_at: Some(100_000), ends_at: None };
        simulation.add_broken_file("/broken", &content, broken).unwrap();
        run(simulation, async {
            let (server, client) = pair().await;
            let sender = spawn_with_result(async move {
                let mut errors = Vec::new();
                for path in ["/file", "/broken"] {
                    let file = files::open(path.as_ref(), OpenFlags::READ).await.unwrap();
                    let mut offset = 0;
                    while offset < 150_000 {
                        match server.sendfile(&file, &mut offset, 150_000).await {
                            Ok(sent) => assert!(sent > 0),
                            Err(error) => {
                                errors.push((offset, error.raw_os_error().unwrap()));
                                break;
                            }
                        }
                    }
                }
                errors
            });
            let transcript = Peer::new(Vec::new()).play(client, &Random::new(1)).await;
            assert_eq!(sender.take().await, [(100_000, libc::EIO)]);
            let expected = [&content[..], &content[..100_000]].concat();
            assert!(transcript.received == expected, "{} bytes", transcript.received.len());
        });
    });
}

#[test]
fn tasks_of_a_pool_end_in_an_order_of_chance_and_never_more_run_than_there_are_threads() {
    let orders = RefCell::new(Vec::new());
    each_seed(SEEDS, |simulation| {
        simulation.set_faults(Faults { task_max: Duration::from_millis(50), ..Faults::NONE });
        let order = Rc::new(RefCell::new(Vec::new()));
        run(simulation, async {
            let pool = ThreadPool::new("simulated", 3, 5);
            let tasks: Vec<_> = (0..8)
                .map(|number| {
                    let (task, order) = (pool.run(move || number), Rc::clone(&order));
                    spawn_with_result(async move {
                        assert_eq!(task.await.unwrap(), number);
                        order.borrow_mut().push(number);
                    })
                })
                .collect();
            let refused = pool.run(|| ()).await.unwrap_err();
            assert_eq!(refused.to_string(), "thread pool \"simulated\" queue overflow: 5 tasks waiting");
            for task in tasks {
                task.take().await;
            }
            assert_eq!(pool.counters().threads, 0, "no thread was started");
            assert_eq!(simulation.pool_tasks(), 0);
        });
        orders.borrow_mut().push(order.take());
    });
    let orders = orders.into_inner();
    assert!(orders.len() < 10 || orders.iter().any(|order| order != &orders[0]));
}

#[test]
fn a_panic_in_a_task_of_a_pool_ends_that_task() {
    run_quiet(async {
        let result = default_pool().run(|| panic!("a test wanted it")).await;
        assert_eq!(result, Err::<(), _>(PoolError::Panicked));
    });
}

#[test]
fn timers_and_events_come_in_the_order_of_time() {
    let simulation = Simulation::new(3, Faults { latency_max: Duration::from_millis(80), ..Faults::NONE });
    run(&simulation, async {
        let (server, client) = pair().await;
        let last = Rc::new(Cell::new(now()));
        for milliseconds in 0..200 {
            let last = Rc::clone(&last);
            spawn(async move {
                sleep(Duration::from_millis(milliseconds)).await;
                assert!(now() >= last.replace(now()));
            });
        }
        for _ in 0..5 {
            let mut output = Output::new();
            output.push(b"x");
            client.send_all(&mut output).await.unwrap();
            let sent = now();
            server.recv(&mut Buffer::new(), 1).await.unwrap();
            assert!(now() >= last.replace(now()));
            assert!(now() - sent <= Duration::from_millis(81));
        }
        sleep(Duration::from_secs(1)).await;
    });
}

#[test]
#[should_panic(expected = "the simulated world stands still")]
fn a_task_that_waits_for_ever_is_found() {
    run_quiet(async {
        let (server, _client) = pair().await;
        server.recv(&mut Buffer::new(), 1).await.unwrap();
    });
}

#[test]
#[should_panic(expected = "runs in circles")]
fn a_task_that_never_rests_is_found() {
    run_quiet(async {
        loop {
            yield_now().await;
        }
    });
}

#[test]
fn datagrams_are_late_lost_or_doubled_but_never_changed() {
    let faults =
        Faults { datagram_losses: 200, datagram_copies: 200, latency_max: Duration::from_millis(5), ..Faults::NONE };
    each_seed(SEEDS, |simulation| {
        simulation.set_faults(faults);
        run(simulation, async {
            let server = Datagram::bind(&address()).unwrap();
            let client = Datagram::connect(&address()).unwrap();
            for number in 0..50u8 {
                client.send(&[number; 3]).unwrap();
            }
            let (mut counts, mut bytes) = ([0; 50], [0; 10]);
            while let Ok(received) = timeout(Duration::from_secs(1), server.recv(&mut bytes)).await {
                let (length, sender) = received.unwrap();
                assert_eq!((length, sender), (3, client.local_address().unwrap()));
                assert!(bytes[..3].iter().all(|&byte| byte == bytes[0]));
                counts[usize::from(bytes[0])] += 1;
            }
            assert!(counts.contains(&0) && counts.contains(&1) && counts.contains(&2));
        });
    });
}

#[test]
fn connected_sender_learns_of_a_closed_port() {
    run_quiet(async {
        let client = Datagram::connect(&address()).unwrap();
        client.send(b"hello").unwrap();
        assert_eq!(client.recv(&mut [0; 8]).await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    });
}
