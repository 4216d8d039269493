//! The io_uring driver on a simulated ring with faults: it loses nothing and leaks nothing.

use std::cell::{Cell, RefCell};
use std::io::{self, ErrorKind};
use std::rc::Rc;
use std::time::Duration;

use gale_files::{self as files, *};
use gale_runtime::simulation::{Faults, Random, RingFaults, Simulation, each_seed};
use gale_runtime::*;

/// Default number of seeds of each test.
const SEEDS: u64 = 40;

/// Length of a request. It holds the number of bytes that follow, and the number wanted back.
const REQUEST_BYTES: usize = 8;

/// Only a client that was forgotten waits so long.
const DEADLINE: Duration = Duration::from_secs(600);

fn address() -> SocketAddress {
    SocketAddress::Inet("192.0.2.1:80".parse().unwrap())
}

/// Byte of the responses at a position in all of a connection's: reveals lost, duplicated and misplaced bytes.
fn byte_at(position: usize) -> u8 {
    ((position as u32).wrapping_mul(2_654_435_761) >> 24) as u8
}

fn ring_of(random: &Random) -> RingOptions {
    RingOptions {
        completions: *random.pick(&[4, 64, 4096]),
        buffers: *random.pick(&[0, 1, 4, 128]),
        buffer_bytes: *random.pick(&[64, 700, 4096]),
        multishot: random.chance(800),
        // Older kernels do not count the bytes of a multishot receive.
        kernel_max: *random.pick(&[None, Some((6, 1))]),
        ..RingOptions::default()
    }
}

fn run<T>(simulation: &Simulation, ring: RingOptions, main: impl Future<Output = T>) -> T {
    let events_max = *Random::new(simulation.seed()).pick(&[1, 7, 512]);
    let options = LoopOptions { driver: DriverChoice::IoUring, ring, events_max, ..LoopOptions::default() };
    EventLoop::simulated(simulation, options).unwrap().run(main)
}

/// Serves like HTTP/1: short responses fire-and-forget, as a copy or in chunks, the rest with a usual send; sometimes
/// watches for the client's hang-up, and may close right behind a response.
async fn serve(stream: Stream, random: Random) -> io::Result<()> {
    let (mut input, mut out) = (Buffer::new(), Output::new());
    let mut position = 0;
    loop {
        while input.len() < REQUEST_BYTES {
            if stream.recv(&mut input, 4096).await? == 0 {
                return Ok(());
            }
        }
        let word = |begin: usize| u32::from_le_bytes(input.readable()[begin..begin + 4].try_into().unwrap()) as usize;
        let (body, answer) = (word(0), word(4));
        input.consume(REQUEST_BYTES);
        // A body is received in larger pieces than a head.
        let mut rest = body;
        while rest > 0 {
            let there = rest.min(input.len());
            input.consume(there);
            rest -= there;
            if rest > 0 && stream.recv(&mut input, rest.min(16_384)).await? == 0 {
                return Ok(());
            }
        }
        if random.chance(200) {
            let _ = timeout(Duration::from_millis(random.below(5)), stream.peer_closed()).await;
        }
        let bytes: Vec<u8> = (position..position + answer).map(byte_at).collect();
        position += answer;
        let sent = match random.below(3) {
            0 => stream.try_send_copy(&bytes, false)?,
            _ => 0,
        };
        bytes[sent..].chunks(1 + answer / 3).for_each(|chunk| out.push(chunk.to_vec()));
        if random.chance(500) && !out.is_empty() {
            stream.try_send(&mut out, false)?;
        }
        if random.chance(50) {
            // Impatient: operations in flight are abandoned.
            let time = Duration::from_micros(random.below(2000));
            if timeout(time, stream.send_all(&mut out)).await.is_err() {
                return Ok(());
            }
        }
        stream.send_all(&mut out).await?;
        if answer > 0 && random.chance(20) {
            return Ok(());
        }
    }
}

/// The server: connections that fail end, and accepting goes on.
fn serve_all(random: &Random) {
    let listener = Listener::bind(&address(), 64, AcceptOptions::default()).unwrap();
    let random = random.fork();
    spawn(async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let random = random.fork();
                    spawn(async move { drop(serve(stream, random).await) });
                }
                Err(_) => sleep(Duration::from_millis(5)).await,
            }
        }
    });
}

/// Requests some responses on one connection and checks every byte of them. True if all of them came.
async fn ask(random: Random) -> io::Result<bool> {
    let stream = Stream::connect(&address()).await?;
    let mut position = 0;
    for _ in 0..1 + random.below(6) {
        let (body, answer, pipelined) = match random.below(6) {
            0 => (6000, 10, 1),
            1 => (10, 20_000, 1),
            2 => (0, 300, 4),
            3 => (0, 5000, 2),
            _ => (0, 2, 1),
        };
        let mut out = Output::new();
        for _ in 0..pipelined {
            out.push(u32::to_le_bytes(body).to_vec());
            out.push(u32::to_le_bytes(answer).to_vec());
            out.push(vec![b'q'; body as usize]);
        }
        let sent = stream.send_all(&mut out).await;
        // The server may have closed; data sent before can still be read.
        let has_left = |error: &io::Error| matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe);
        sent.or_else(|error| if has_left(&error) { Ok(()) } else { Err(error) })?;
        let mut wanted = (answer * pipelined) as usize;
        while wanted > 0 {
            let mut input = Buffer::new();
            let count = stream.recv(&mut input, wanted).await?;
            if count == 0 {
                return Ok(false);
            }
            for &byte in input.readable() {
                assert_eq!(byte, byte_at(position), "at {position}");
                position += 1;
            }
            wanted -= count;
        }
        if random.chance(200) {
            // Longer than an idle receive stays armed.
            sleep(Duration::from_secs(random.below(10))).await;
        }
    }
    Ok(true)
}

/// Runs clients concurrently; returns their number, and the number of those that got everything.
async fn ask_all(random: &Random, errors: &RefCell<Vec<ErrorKind>>) -> (usize, usize) {
    let (left, whole) = (Rc::new(Cell::new(random.up_to(12))), Rc::new(Cell::new(0)));
    let count = left.get();
    let found = Rc::new(RefCell::new(Vec::new()));
    for _ in 0..count {
        let (left, whole, random, found) = (Rc::clone(&left), Rc::clone(&whole), random.fork(), Rc::clone(&found));
        spawn(async move {
            match ask(random).await {
                Ok(is_whole) => whole.set(whole.get() + usize::from(is_whole)),
                Err(error) => found.borrow_mut().push(error.kind()),
            }
            left.set(left.get() - 1);
        });
    }
    let (panics, began) = (panic_count(), now());
    while left.get() > 0 {
        assert!(now() - began < DEADLINE, "{} clients were forgotten", left.get());
        assert_eq!(panic_count(), panics, "a client has failed");
        sleep(Duration::from_millis(100)).await;
    }
    errors.borrow_mut().extend(found.take());
    (count, whole.get())
}

/// Checks that no resources of connections are left.
async fn assert_nothing_left(simulation: &Simulation) {
    all_sent().await;
    sleep(Duration::from_secs(30)).await;
    assert_eq!((simulation.open_ends(), task_count(), leased_bytes(), simulation.ring_buffers_taken()), (0, 1, 0, 0));
}

fn add(sum: &mut RingFaults, more: RingFaults) {
    let RingFaults {
        refused,
        sends_refused,
        buffers_missed,
        receives_ended,
        doorbells_ended,
        cancellations_missed,
        cancelled,
        sends_shortened,
        fire_and_forget_sends_failed,
        late,
        polls_in_vain,
        calls_cut_short,
        overflows,
        lost,
        closed_in_use,
    } = more;
    sum.refused += refused;
    sum.sends_refused += sends_refused;
    sum.buffers_missed += buffers_missed;
    sum.receives_ended += receives_ended;
    sum.doorbells_ended += doorbells_ended;
    sum.cancellations_missed += cancellations_missed;
    sum.cancelled += cancelled;
    sum.sends_shortened += sends_shortened;
    sum.fire_and_forget_sends_failed += fire_and_forget_sends_failed;
    sum.late += late;
    sum.polls_in_vain += polls_in_vain;
    sum.calls_cut_short += calls_cut_short;
    sum.overflows += overflows;
    sum.lost += lost;
    sum.closed_in_use += closed_in_use;
}

/// True if this run has all default seeds.
fn has_all_seeds() -> bool {
    std::env::var_os("GALE_SEED").is_none() && std::env::var_os("GALE_SEEDS").is_none()
}

#[test]
fn answers_are_whole_and_in_order_despite_faults_of_the_ring() {
    let (seen, idle) = (RefCell::new(RingFaults::default()), Cell::new(0));
    let errors = RefCell::new(Vec::new());
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        simulation.set_faults(Faults { accept_failures: 0, ..Faults::swarm(&random) });
        run(simulation, ring_of(&random), async {
            serve_all(&random);
            let (count, whole) = ask_all(&random, &errors).await;
            assert!(whole <= count);
            assert_nothing_left(simulation).await;
            idle.set(idle.get() + ring_counters().idle);
            assert_eq!(ring_counters().refused, 0);
        });
        add(&mut seen.borrow_mut(), simulation.ring_faults());
    });
    // A server that closes behind a response has unread pipelined requests, which causes a reset.
    assert!(errors.borrow().iter().all(|kind| matches!(kind, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)));
    let seen = seen.take();
    if has_all_seeds() {
        let RingFaults { buffers_missed, receives_ended, doorbells_ended, cancellations_missed, .. } = seen;
        assert!(
            [buffers_missed, receives_ended, doorbells_ended, cancellations_missed].iter().all(|&n| n > 0),
            "{seen:?}"
        );
        let RingFaults { cancelled, sends_shortened, fire_and_forget_sends_failed, late, polls_in_vain, .. } = seen;
        assert!(
            [cancelled, sends_shortened, fire_and_forget_sends_failed, late, polls_in_vain].iter().all(|&n| n > 0),
            "{seen:?}"
        );
        let RingFaults { calls_cut_short, overflows, closed_in_use, .. } = seen;
        assert!([calls_cut_short, overflows, closed_in_use, idle.get()].iter().all(|&n| n > 0), "{seen:?}");
    }
}

#[test]
fn connections_that_the_kernel_has_no_memory_for_end_and_the_loop_goes_on() {
    let (seen, refused) = (RefCell::new(RingFaults::default()), Cell::new(0));
    let errors = RefCell::new(Vec::new());
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        let ring_memory = *random.pick(&[20, 100, 300]);
        simulation.set_faults(Faults { accept_failures: 0, ring_memory, ..Faults::swarm(&random) });
        run(simulation, ring_of(&random), async {
            serve_all(&random);
            ask_all(&random, &errors).await;
            refused.set(refused.get() + ring_counters().refused);
            // With memory everything works again: nothing was leaked, no client is forgotten.
            simulation.set_faults(Faults { ring_memory: 0, ..simulation.faults() });
            let (count, _) = ask_all(&random, &RefCell::default()).await;
            assert!(count > 0);
            assert_nothing_left(simulation).await;
        });
        add(&mut seen.borrow_mut(), simulation.ring_faults());
    });
    if has_all_seeds() {
        assert!(seen.take().refused > 0 && refused.get() > 0);
        assert!(errors.borrow().contains(&ErrorKind::OutOfMemory), "nobody was told");
    }
}

#[test]
fn connections_of_which_a_completion_is_lost_end_and_the_loop_goes_on() {
    let (seen, noticed, whole) = (RefCell::new(RingFaults::default()), Cell::new(0), Cell::new(0));
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        let ring_losses = *random.pick(&[20, 200, 1000]);
        simulation.set_faults(Faults { accept_failures: 0, ring_losses, ..Faults::swarm(&random) });
        let ring = RingOptions { completions: *random.pick(&[2, 4]), ..ring_of(&random) };
        run(simulation, ring, async {
            serve_all(&random);
            // A wrong byte fails a client, and so does a missing completion.
            let (_, got_all) = ask_all(&random, &RefCell::default()).await;
            whole.set(whole.get() + got_all);
            noticed.set(noticed.get() + ring_counters().lost);
            // With memory everything works again: nothing was leaked, no client is forgotten.
            simulation.set_faults(Faults { ring_losses: 0, ..simulation.faults() });
            let errors = RefCell::default();
            ask_all(&random, &errors).await;
            assert!(!errors.borrow().contains(&ErrorKind::OutOfMemory), "{errors:?}");
            assert_nothing_left(simulation).await;
        });
        add(&mut seen.borrow_mut(), simulation.ring_faults());
    });
    if has_all_seeds() {
        assert!(seen.take().lost > 0 && noticed.get() > 0 && whole.get() > 0);
    }
}

#[test]
fn a_loop_with_an_operation_that_a_thread_of_the_kernel_works_at_fails_when_completions_are_lost() {
    let simulation = Simulation::new(1, Faults { ring_losses: 1000, ring_workers: 1000, ..Faults::NONE });
    let ring = RingOptions { completions: 2, ..RingOptions::default() };
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        run(&simulation, ring, async {
            let random = Random::new(simulation.seed());
            serve_all(&random);
            ask_all(&random, &RefCell::default()).await;
        })
    }));
    assert!(failed.is_err() && simulation.ring_faults().lost > 0);
}

#[test]
fn answers_for_which_a_direct_send_has_no_memory_leave_later_and_none_takes_their_place() {
    let seen = RefCell::new(RingFaults::default());
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        let (ring_direct_sends, ring_memory) = (*random.pick(&[100, 300]), *random.pick(&[0, 20]));
        let faults = Faults { ring_direct_sends, ring_memory, ..Faults::swarm(&random) };
        simulation.set_faults(Faults { accept_failures: 0, ..faults });
        run(simulation, ring_of(&random), async {
            serve_all(&random);
            // A wrong byte fails a client; lack of memory is an allowed error.
            ask_all(&random, &RefCell::default()).await;
            assert_nothing_left(simulation).await;
        });
        add(&mut seen.borrow_mut(), simulation.ring_faults());
    });
    assert!(!has_all_seeds() || seen.take().sends_refused > 0);
}

#[test]
fn connections_whose_close_the_kernel_refused_are_closed_when_the_loop_ends() {
    const CONNECTIONS: usize = 8;
    each_seed(SEEDS, |simulation| {
        let options = LoopOptions { driver: DriverChoice::IoUring, events_max: 1, ..LoopOptions::default() };
        EventLoop::simulated(simulation, options).unwrap().run(async {
            let listener = Listener::bind(&address(), 64, AcceptOptions::default()).unwrap();
            let mut streams = Vec::new();
            for _ in 0..CONNECTIONS {
                streams.push(Stream::connect(&address()).await.unwrap());
                streams.push(listener.accept().await.unwrap().0);
            }
            simulation.set_faults(Faults { ring_memory: 1000, ..Faults::NONE });
            drop(streams);
            // The turn that submits the closes sees only one completion.
            yield_now().await;
            assert!(ring_counters().refused > 0);
        });
        assert_eq!(simulation.open_ends(), 0);
    });
}

#[test]
fn fire_and_forget_sends_that_full_sockets_do_not_take_leave_later_however_few_completions_are_seen() {
    const CONNECTIONS: usize = 16;
    let seen = RefCell::new(RingFaults::default());
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        let small_windows = Faults { small_windows: 1000, ..Faults::swarm(&random) };
        simulation.set_faults(Faults { accept_failures: 0, would_block: 0, ..small_windows });
        let ring = RingOptions { completions: *random.pick(&[2, 8]), ..ring_of(&random) };
        run(simulation, ring, async {
            let listener = Listener::bind(&address(), 64, AcceptOptions::default()).unwrap();
            let mut clients = Vec::new();
            for _ in 0..CONNECTIONS {
                clients.push(Stream::connect(&address()).await.unwrap());
                let (server, _) = listener.accept().await.unwrap();
                spawn(async move { drop(serve_fire_and_forget(server).await) });
            }
            // Streams use the ring after a receive has waited.
            sleep(Duration::from_secs(1)).await;
            for client in &clients {
                let mut out = Output::new();
                out.push(b"!");
                client.send_all(&mut out).await.unwrap();
            }
            sleep(Duration::from_secs(1)).await;
            for client in clients {
                let (mut position, mut input) = (0, Buffer::new());
                while client.recv(&mut input, 5000).await.unwrap() > 0 {
                    for &byte in input.readable() {
                        assert_eq!(byte, byte_at(position), "at {position}");
                        position += 1;
                    }
                    input.clear();
                }
                assert!(position >= FIRE_AND_FORGET_BYTES, "{position} bytes");
            }
        });
        add(&mut seen.borrow_mut(), simulation.ring_faults());
    });
    let seen = seen.take();
    assert!(!has_all_seeds() || seen.fire_and_forget_sends_failed > 0 && seen.overflows > 0, "{seen:?}");
}

/// More than the windows hold.
const FIRE_AND_FORGET_BYTES: usize = 11_000;

/// Sends a piece fire-and-forget in each turn, sends the rest, and closes.
async fn serve_fire_and_forget(stream: Stream) -> io::Result<()> {
    stream.recv(&mut Buffer::new(), 100).await?;
    let mut position = 0;
    while position < FIRE_AND_FORGET_BYTES {
        let bytes: Vec<u8> = (position..position + 300).map(byte_at).collect();
        position += bytes.len();
        let taken = stream.try_send_copy(&bytes, false)?;
        yield_now().await;
        let mut out = Output::new();
        out.push(bytes[taken..].to_vec());
        stream.send_all(&mut out).await?;
    }
    Ok(())
}

#[test]
fn reads_of_files_whose_completions_are_lost_are_done_by_a_pool_and_counted() {
    const READS: u64 = 40;
    const PIECE: usize = 4096;
    let content: Vec<u8> = (0..READS as usize * PIECE).map(byte_at).collect();
    let (lost, kept) = (Cell::new(0), Cell::new(0));
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        let ring_losses = *random.pick(&[200, 1000]);
        simulation.set_faults(Faults { ring_losses, ..Faults::swarm(&random) });
        simulation.add_file("/file", &content).unwrap();
        let ring = RingOptions { completions: *random.pick(&[2, 8]), ..ring_of(&random) };
        run(simulation, ring, async {
            let pool = ThreadPool::new("test", 4, 1000);
            let file = files::open(std::path::Path::new("/file"), OpenFlags::READ).await.unwrap();
            let read_all = async || {
                let how = ReadHow { by_ring: true, ..ReadHow::default() };
                let begin = |number| file.begin_read(&pool, number * PIECE as u64, PIECE, how).unwrap();
                let left = Rc::new(Cell::new(READS));
                for number in 0..READS {
                    let (read, left, begins) = (begin(number), Rc::clone(&left), number as usize * PIECE);
                    let expected = content[begins..begins + PIECE].to_vec();
                    spawn(async move {
                        assert_eq!(read.await.unwrap()[..], expected[..]);
                        left.set(left.get() - 1);
                    });
                }
                let panics = panic_count();
                while left.get() > 0 {
                    assert_eq!(panic_count(), panics, "a read has failed");
                    sleep(Duration::from_millis(100)).await;
                }
            };
            read_all().await;
            // Late completions have arrived by then.
            sleep(Duration::from_secs(1)).await;
            let counters = ring_counters();
            assert!(counters.reads_kept <= counters.lost, "{counters:?}");
            lost.set(lost.get() + counters.lost);
            kept.set(kept.get() + counters.reads_kept);
            // With memory everything works again.
            simulation.set_faults(Faults { ring_losses: 0, ..simulation.faults() });
            read_all().await;
            sleep(Duration::from_secs(1)).await;
            assert_eq!(ring_counters().reads_kept, counters.reads_kept, "nothing more was lost");
        });
    });
    if has_all_seeds() {
        assert!(lost.get() > 0 && kept.get() > 0, "{} lost, {} kept", lost.get(), kept.get());
    }
}
