//! The event loop, one per worker thread. A turn handles events, calls, timers and runnable tasks, in this order, each
//! within limits, and then waits for the next event or timer.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::driver::epoll::Epoll;
use crate::driver::io_uring::IoUring;
use crate::driver::simulated::Simulated;
use crate::driver::{Driver, RingOptions};
use crate::environment::Environment;
use crate::executor::budget::{BULK_NANOS, Budget, TURN_NANOS};
use crate::executor::panics::{self, boundary};
use crate::executor::{Executor, POLLS_PER_TURN, Runnable};
use crate::inbox::{self, Call, Inbox, Remote};
use crate::memory::blocks;
use crate::memory::limits;
use crate::simulation::{SimulatedKernel, Simulation, World};
use crate::stall::calls::LoopCalls;
use crate::stall::turn_timer::TurnTimer;
use crate::stall::usage::ThreadUsage;
use crate::time::{Clock, ClockChoice, Wheel};

/// Calls from other threads that are handled per turn.
const CALLS_PER_TURN: usize = 64;

/// Polls between two readings of the clock: together they take no more than a quarter of a turn.
const POLLS_PER_LOOK: usize = 8;

/// Longer waits exceed what some kernels and sandboxes accept; a turn per hour costs nothing.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// The driver of a loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DriverChoice {
    /// The best available driver: io_uring from Linux 6.1 on (`docs/decisions/0009-io-uring.md`), else epoll.
    #[default]
    Auto,
    /// epoll.
    Epoll,
    /// io_uring; epoll where the kernel refuses it, see [`EventLoop::driver_reason`].
    IoUring,
}

impl DriverChoice {
    /// The name in the configuration (`use`).
    pub fn name(self) -> &'static str {
        match self {
            DriverChoice::Auto => "auto",
            DriverChoice::Epoll => "epoll",
            DriverChoice::IoUring => "io_uring",
        }
    }
}

/// Options of a loop.
#[derive(Clone, Debug)]
pub struct LoopOptions {
    /// The driver.
    pub driver: DriverChoice,
    /// The clock; virtual for tests.
    pub clock: ClockChoice,
    /// The number that [`crate::worker`] returns.
    pub worker: usize,
    /// Limit of events taken in one call (`epoll_events`; nginx has 512).
    pub events_max: usize,
    /// Limit of leased bytes, see [`crate::leases_exhausted`]. `None` = a quarter of the memory that the machine has
    /// and the process's cgroups allow, at least 64 MiB, until [`crate::share_leases`] divides that between the loops.
    pub leased_bytes_max: Option<usize>,
    /// Parameters of the io_uring.
    pub ring: RingOptions,
    /// Seed of [`crate::random_u64`]; from the kernel if `None`.
    pub seed: Option<u64>,
    /// True if a task that panics ends alone, as in a server. Otherwise the panic ends the loop, so that no test
    /// overlooks it.
    pub survives_panics: bool,
}

impl Default for LoopOptions {
    fn default() -> Self {
        LoopOptions {
            driver: DriverChoice::Auto,
            clock: ClockChoice::System,
            worker: 0,
            events_max: 512,
            leased_bytes_max: None,
            ring: RingOptions::default(),
            seed: None,
            survives_panics: false,
        }
    }
}

impl LoopOptions {
    /// For tests: virtual time and a fixed seed.
    pub fn simulated_time() -> Self {
        LoopOptions { clock: ClockChoice::Virtual, seed: Some(1), ..LoopOptions::default() }
    }
}

/// An event loop. It stays on the thread that created it.
pub struct EventLoop {
    environment: Rc<Environment>,
    driver_reason: Option<io::Error>,
    index: usize,
    /// None in virtual time, in which no turn is long.
    turn_timer: Option<TurnTimer>,
    calls: Vec<Call>,
    wakes: Vec<u64>,
    expired: Vec<Waker>,
}

impl EventLoop {
    /// Sets up a loop. Errors: the kernel's, when there are no descriptors or no memory for it.
    pub fn new(options: LoopOptions) -> io::Result<Self> {
        panics::install();
        let inbox = Inbox::new(options.worker)?;
        let (driver, driver_reason) = set_up_driver(&options, &inbox)?;
        let seed = match options.seed {
            Some(seed) => seed,
            None => random_seed()?,
        };
        let mut event_loop = EventLoop::with(&options, inbox, driver, Clock::new(options.clock), seed, None)?;
        event_loop.driver_reason = driver_reason;
        Ok(event_loop)
    }

    /// Sets up a loop in a simulated world, see [`Simulation`], which replaces clock and seed of the options. With
    /// [`DriverChoice::IoUring`] the driver is the io_uring driver over a simulated ring; else one that stands for both
    /// others. Errors: no descriptor for the inbox.
    pub fn simulated(simulation: &Simulation, options: LoopOptions) -> io::Result<Self> {
        panics::install();
        let world = Rc::clone(simulation.world());
        let inbox = Inbox::new(options.worker)?;
        let driver: Box<dyn Driver> = match options.driver {
            DriverChoice::IoUring => {
                let (queues, sockets) = SimulatedKernel::ring(&world, options.ring.completions);
                let events_max = options.events_max.max(1);
                let ring = IoUring::<SimulatedKernel>::over(
                    queues,
                    sockets,
                    &options.ring,
                    true,
                    events_max,
                    inbox.eventfd(),
                )?;
                Box::new(ring)
            }
            DriverChoice::Auto | DriverChoice::Epoll => Box::new(Simulated::new(Rc::clone(&world))),
        };
        let clock = Clock::shared(Rc::clone(world.fate.clock()));
        EventLoop::with(&options, inbox, driver, clock, simulation.seed(), Some(world))
    }

    fn with(
        options: &LoopOptions,
        inbox: Arc<Inbox>,
        driver: Box<dyn Driver>,
        clock: Clock,
        seed: u64,
        simulation: Option<Rc<World>>,
    ) -> io::Result<Self> {
        let leased_bytes_max = options.leased_bytes_max.unwrap_or_else(|| limits::share_of_leases(1));
        blocks::set_leased_bytes_max(leased_bytes_max);
        let turn_timer = if clock.is_virtual() { None } else { Some(TurnTimer::new()?) };
        let index = inbox::register(&inbox)?;
        let environment = Rc::new(Environment {
            worker: options.worker,
            executor: Executor::new(index, options.survives_panics),
            wheel: Wheel::new(clock.now()).into(),
            clock,
            driver,
            inbox,
            random: seed.into(),
            budget: Budget::default(),
            calls: LoopCalls::default(),
            simulation,
        });
        Ok(EventLoop {
            environment,
            driver_reason: None,
            index,
            turn_timer,
            calls: Vec::new(),
            wakes: Vec::new(),
            expired: Vec::new(),
        })
    }

    /// A handle for other threads.
    pub fn remote(&self) -> Remote {
        Remote::new(Arc::clone(&self.environment.inbox))
    }

    /// The name in the configuration (`use`) of the driver in use.
    pub fn driver_name(&self) -> &'static str {
        self.environment.driver.name()
    }

    /// The reason why epoll is used although io_uring was chosen, or would be better; `None` if the choice was
    /// followed.
    pub fn driver_reason(&self) -> Option<&io::Error> {
        self.driver_reason.as_ref()
    }

    /// Runs `main` and all tasks until `main` is done. The remaining tasks wait for the next `run`, or are dropped with
    /// the loop. A panic in `main` is not caught, nor one in a task unless [`LoopOptions::survives_panics`] is set.
    /// Panics if the kernel refuses to wait for events.
    pub fn run<F: Future>(&mut self, main: F) -> F::Output {
        let environment = Rc::clone(&self.environment);
        let _entered = environment.enter();
        let mut main = pin!(main);
        let waker = environment.executor.begin_main();
        let _ended = EndMain(&environment);
        let turns = &environment.inbox.turns;
        self.begin_turn();
        loop {
            self.take_calls_and_wakes();
            self.expire_timers();
            environment.executor.begin_turn();
            environment.begin_budget();
            let mut is_at_end = false;
            let mut polls = 0;
            while polls < POLLS_PER_TURN && !self.is_turn_over(polls) {
                let runnable = match environment.executor.pop() {
                    Some(runnable) => runnable,
                    None if environment.wake_bulk() => continue,
                    None if !is_at_end && environment.executor.end_turn() => {
                        is_at_end = true;
                        continue;
                    }
                    None => break,
                };
                polls += 1;
                match runnable {
                    Runnable::Task(key) => {
                        environment.begin_poll(key);
                        environment.executor.poll_task(key, turns);
                        environment.end_poll();
                    }
                    Runnable::Main(key) => {
                        turns.note(|| "the main task");
                        environment.begin_poll(key);
                        environment.executor.set_main_running(true);
                        let polled = main.as_mut().poll(&mut Context::from_waker(&waker));
                        environment.executor.set_main_running(false);
                        environment.end_poll();
                        if let Poll::Ready(output) = polled {
                            return output;
                        }
                    }
                }
            }
            environment.end_budget();
            if !is_at_end {
                environment.executor.end_turn();
            }
            self.wait();
        }
    }

    /// True if the tasks of this turn have used their time, by the clock or by the estimate for the call that ends the
    /// turn. The remaining ones are first in the next turn, after a look for events.
    fn is_turn_over(&self, polls: usize) -> bool {
        let Environment { clock, budget, .. } = &*self.environment;
        let is_late = || clock.read() - clock.now().as_nanos() >= TURN_NANOS + BULK_NANOS;
        budget.is_turn_spent() || polls > 0 && polls.is_multiple_of(POLLS_PER_LOOK) && !clock.is_virtual() && is_late()
    }

    fn take_calls_and_wakes(&mut self) {
        self.environment.inbox.take(CALLS_PER_TURN, &mut self.calls, &mut self.wakes);
        for word in self.wakes.drain(..) {
            self.environment.executor.wake(crate::executor::key_of(word));
        }
        for call in self.calls.drain(..) {
            self.environment.inbox.turns.note(|| "a call from another thread");
            let outcome = boundary("call", call);
            self.environment.executor.judge(outcome.err());
        }
    }

    fn expire_timers(&mut self) {
        self.environment.wheel.borrow_mut().advance(self.environment.clock.now(), &mut self.expired);
        self.expired.drain(..).for_each(Waker::wake);
    }

    /// Ends the turn, waits for the next event, and begins the next turn.
    fn wait(&mut self) {
        let Environment { clock, inbox, wheel, driver, calls, .. } = &*self.environment;
        let ended = clock.read();
        inbox.turns.end(clock.now().as_nanos(), ended);
        inbox.note_leased(blocks::leased_bytes(), blocks::leased_bytes_max());
        calls.end_turn(&inbox.turns, clock.now().as_nanos());
        let next_timer = wheel.borrow().next_look();
        // The times of simulated events are known too.
        let next_event = || if clock.is_virtual() { driver.next_event() } else { None };
        // In virtual time only threads outside the loop take real time: sockets between tasks of this loop answer at
        // once.
        let may_jump = || clock.is_virtual() && inbox.outside.load(SeqCst) == 0;
        let busy = self.environment.has_work();
        let wait = match next_timer.or_else(next_event) {
            _ if busy || !inbox.may_sleep() => Some(Duration::ZERO),
            Some(_) if may_jump() => Some(Duration::ZERO),
            Some(nanos) if !clock.is_virtual() => Some(Duration::from_nanos(nanos.saturating_sub(ended)).min(WAIT_MAX)),
            _ => None,
        };
        if let Some(turn_timer) = self.turn_timer.as_ref().filter(|_| wait != Some(Duration::ZERO)) {
            turn_timer.rest();
        }
        // Without events the loop cannot go on, and retries would only waste the processor. (Lack of memory is no error
        // here.)
        let events = driver.wait(wait).unwrap_or_else(|error| panic!("cannot wait for events: {error}"));
        if !busy {
            inbox.awake();
        }
        // The wait may have planned a simulated event.
        if let Some(nanos) = next_timer.into_iter().chain(next_event()).min()
            // In this order: a thread that leaves the outside has filled the inbox before.
            && may_jump()
            && events == 0
            && !self.environment.has_work()
            && !inbox.is_pending()
        {
            clock.advance_to(nanos);
        }
        self.begin_turn();
    }

    fn begin_turn(&self) {
        let Environment { clock, inbox, .. } = &*self.environment;
        if self.turn_timer.is_some() {
            inbox.turns.announce();
        }
        clock.begin_turn();
        inbox.turns.note(|| "events and timers");
        if let Some(turn_timer) = &self.turn_timer {
            let now = clock.now().as_nanos();
            inbox.turns.begin(now);
            if turn_timer.begin_turn(now) {
                inbox.turns.mark(now, ThreadUsage::now());
            }
        }
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        let _entered = self.environment.enter();
        self.environment.executor.close();
        self.environment.inbox.close();
        inbox::unregister(self.index);
    }
}

struct EndMain<'a>(&'a Environment);

impl Drop for EndMain<'_> {
    fn drop(&mut self) {
        self.0.executor.set_main_running(false);
        self.0.executor.end_main();
        self.0.inbox.turns.end(self.0.clock.now().as_nanos(), self.0.clock.read());
    }
}

/// The chosen driver, or epoll and the reason for it.
fn set_up_driver(options: &LoopOptions, inbox: &Inbox) -> io::Result<(Box<dyn Driver>, Option<io::Error>)> {
    let events_max = options.events_max.max(1);
    let reason = match options.driver {
        DriverChoice::Epoll => None,
        DriverChoice::Auto | DriverChoice::IoUring => {
            let is_best_only = options.driver == DriverChoice::Auto;
            match IoUring::new(&options.ring, is_best_only, events_max, inbox.eventfd()) {
                Ok(driver) => return Ok((Box::new(driver), None)),
                Err(error) => Some(error),
            }
        }
    };
    Ok((Box::new(Epoll::new(events_max, inbox.eventfd())?), reason))
}

fn random_seed() -> io::Result<u64> {
    let mut seed = [0; 8];
    rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(seed))
}
