//! Services in a simulated world: when they run, how they end, and that each one runs only once at a time.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gale_config::{Body, Contexts, Custom, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::{Directive, Module, Order};
use gale_engine::serve::Serving;
use gale_modules::{core, event};
use gale_process::{LockFile, Worker};
use gale_runtime::simulation::{Faults, Random, Simulation, each_seed};
use gale_runtime::{LoopOptions, Moment, now, sleep, task_count, yield_now};
use gale_worker::service::{Context, LockShare, Service, ServiceSpec};

use crate::support::{SLOT, Site, panic_on_purpose};

/// No protocol: services need none.
static ORDER: Order = Order { modules: &[&core::MODULE, &event::MODULE, &MODULE], protocols: &[], figures: None };

static MODULE: Module = Module {
    name: "recorded",
    directives: &[Directive {
        name: "service",
        contexts: Contexts::MAIN,
        takes: Takes::AtLeast(2),
        body: Body::None,
        default: "",
        about: "NAME KIND [WORD …]",
        store: &Custom(|_: &mut (), builder: &mut Builder, statement| {
            let mut words: Vec<String> = statement.args.iter().map(|word| word.text.to_string()).collect();
            let name = words.remove(0);
            let lock = words.iter().position(|word| word.starts_with("lock=")).map(|at| words.remove(at));
            let service = Recorded { words };
            let spec = match lock.as_deref().and_then(|lock| lock.strip_prefix("lock=")) {
                Some(path) => ServiceSpec::exclusive(name, path, service),
                None => ServiceSpec::per_process(name, service),
            };
            builder.add_service(spec, statement.span)
        }),
    }],
    ..Module::EMPTY
};

struct Recorded {
    words: Vec<String>,
}

impl Service for Recorded {
    async fn run(context: Context<Self>) {
        let life = Life::begin(context);
        let context = &life.0;
        let settings = context.settings();
        let mut count = 0;
        let run = async || {
            count += 1;
            record(format!("{} {count}", context.name()));
            if settings.has("slow") && count == 3 {
                sleep(Duration::from_secs(25)).await;
            }
        };
        match &*settings.words[0] {
            "every" => context.every(Duration::from_secs(10), run).await,
            "panics" => panic_on_purpose("in a service"),
            "returns" => {}
            "keeps" => KEPT.set(context.lock_share()),
            "stuck" => std::future::pending().await,
            "writes" => {
                context.stopping().await;
                sleep(Duration::from_secs(2)).await;
                record(format!("{} written", context.name()));
            }
            "told" => {
                while context.unless_stopping(context.changed()).await.is_some() {
                    record(format!("{} told {}", context.name(), context.settings().words[1]));
                }
            }
            other => panic!("no kind of service is called {other}"),
        }
    }

    fn continues(&self, earlier: &Self) -> bool {
        if self.has("undecided") {
            panic_on_purpose("in an answer");
        }
        self.has("continues") && self.words[0] == earlier.words[0]
    }
}

impl Recorded {
    fn has(&self, word: &str) -> bool {
        self.words.iter().any(|known| known == word)
    }
}

thread_local! {
    /// Events of services, with their second.
    static RECORD: RefCell<Vec<(u64, String)>> = const { RefCell::new(Vec::new()) };
    /// Start of the record.
    static START: RefCell<Option<Moment>> = const { RefCell::new(None) };
    /// Set if a service has run twice at a time; a panic there would only end one of them.
    static HAS_OVERLAPPED: Cell<bool> = const { Cell::new(false) };
    /// Keeps a share of the lock, like a task that outlives its service.
    static KEPT: RefCell<Option<LockShare>> = const { RefCell::new(None) };
    /// Running services.
    static ALIVE: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

fn record(what: String) {
    let start = START.with_borrow_mut(|start| *start.get_or_insert(now()));
    RECORD.with_borrow_mut(|record| record.push((now().since(start).as_secs(), what)));
}

/// Recorded lifetime of a service, from its beginning to any end.
struct Life(Context<Recorded>);

impl Life {
    fn begin(context: Context<Recorded>) -> Life {
        let name = context.name().to_owned();
        ALIVE.with_borrow_mut(|alive| {
            HAS_OVERLAPPED.set(HAS_OVERLAPPED.get() || alive.contains(&name));
            alive.push(name.clone());
        });
        record(format!("{name} begins"));
        Life(context)
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        ALIVE.with_borrow_mut(|alive| alive.retain(|name| name != self.0.name()));
        record(format!("{} ends", self.0.name()));
    }
}

/// Events since the last call.
fn recorded() -> Vec<(u64, String)> {
    RECORD.take()
}

/// Takes all recorded events. Returns the times of this one, in seconds from the start of the record.
fn seconds_of(what: &str) -> Vec<u64> {
    recorded().into_iter().filter(|(_, recorded)| recorded == what).map(|(second, _)| second).collect()
}

fn site<'s>(simulation: &'s Simulation, services: &str) -> Site<'s> {
    Site::with_order(simulation, &ORDER, &format!("events {{ }} {services}"))
}

/// Runs `main` in a world without faults, beside these services. The record starts empty.
fn run(services: &str, main: impl AsyncFnOnce(&Site, &mut Serving)) {
    let simulation = Simulation::new(1, Faults::NONE);
    begin_record();
    let site = site(&simulation, services);
    site.run(LoopOptions::default(), async |serving| main(&site, serving).await);
    assert!(!HAS_OVERLAPPED.get());
}

/// Path of the lock file of a test.
fn lock_path(test: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}.lock", std::process::id()))
}

fn begin_record() {
    RECORD.take();
    START.take();
    ALIVE.take();
    HAS_OVERLAPPED.set(false);
}

async fn seconds(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

async fn reload(site: &Site<'_>, serving: &mut Serving, services: &str) {
    serving.commit(SLOT, site.build_text(&format!("events {{ }} {services}"))).await;
    serving.settled();
}

#[test]
fn every_runs_at_once_then_each_period_and_skips_missed_ones() {
    run("service quick every; service slow every slow;", async |_, _| {
        seconds(85).await;
        let all = recorded();
        let of = |name: &str| -> Vec<u64> {
            all.iter().filter(|(_, what)| what.split(' ').next() == Some(name)).map(|(second, _)| *second).collect()
        };
        // The first one is the start.
        assert_eq!(of("quick"), [0, 0, 10, 20, 30, 40, 50, 60, 70, 80]);
        assert_eq!(of("slow"), [0, 0, 10, 20, 50, 60, 70, 80]);
    });
}

#[test]
fn service_begins_when_all_loops_have_settled_and_not_before() {
    run("", async |site, serving| {
        serving.commit(SLOT, site.build_text("events { } service one every;")).await;
        seconds(100).await;
        assert!(recorded().is_empty());
        serving.settled();
        yield_now().await;
        seconds(1).await;
        assert_eq!(recorded().len(), 2);
    });
}

#[test]
fn reload_keeps_renews_or_ends_a_service_by_its_name() {
    let services = "service kept every continues; service renewed every; service told told a continues;
                    service undecided every undecided; service done returns continues; service again returns;
                    service gone every;";
    run(services, async |site, serving| {
        seconds(15).await;
        recorded();
        let services = services.replace("told a", "told b").replace("service gone every;", "service new every;");
        reload(site, serving, &services).await;
        seconds(1).await;
        let mut all: Vec<String> = recorded().into_iter().map(|(_, what)| what).collect();
        all.sort();
        let expected = [
            "again begins",
            "again ends",
            "gone ends",
            "new 1",
            "new begins",
            "renewed 1",
            "renewed begins",
            "renewed ends",
            "told told b",
            "undecided 1",
            "undecided begins",
            "undecided ends",
        ];
        assert_eq!(all, expected);
        seconds(10).await;
        assert_eq!(seconds_of("kept 3"), [20]);
    });
}

#[test]
fn drain_waits_for_a_service_that_writes_and_drops_one_that_never_ends() {
    let services = "service writes writes; service stuck stuck; service every every;";
    run(services, async |_, serving| {
        seconds(15).await;
        recorded();
        serving.drain(None).await;
        let ends: Vec<(u64, String)> = recorded();
        let expected = [(15, "every ends"), (17, "writes written"), (17, "writes ends"), (20, "stuck ends")];
        assert_eq!(ends, expected.map(|(second, what)| (second, what.to_owned())));
        // A change in progress starts nothing any more.
        serving.settled();
        seconds(100).await;
        assert!(recorded().is_empty());
    });
    run(services, async |_, serving| {
        seconds(15).await;
        let drained = serving.drain(None);
        recorded();
        serving.expire(None);
        drained.await;
        assert_eq!(recorded().iter().filter(|(second, what)| *second == 15 && what.ends_with(" ends")).count(), 3);
    });
}

#[test]
fn service_that_panics_again_and_again_is_started_later_and_later() {
    run("service bad panics; service good every;", async |_, _| {
        seconds(250).await;
        assert_eq!(seconds_of("bad begins"), [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]);
    });
}

#[test]
fn replaced_service_is_waited_for_by_its_successor() {
    run("service one writes;", async |site, serving| {
        seconds(1).await;
        for _ in 0..3 {
            reload(site, serving, "service one writes;").await;
        }
        seconds(20).await;
        // The middle ones were to end before they began.
        assert_eq!(seconds_of("one begins"), [0, 3]);
    });
}

#[test]
fn lock_of_a_service_that_is_dropped_is_released_by_the_pool() {
    let path = lock_path("dropped");
    let simulation = Simulation::new(1, Faults::NONE);
    begin_record();
    let site = site(&simulation, &format!("service one stuck lock={};", path.display()));
    site.run(LoopOptions::default(), async |serving| {
        seconds(5).await;
        let other = Arc::new(LockFile::open(&path).expect("it is there"));
        assert_eq!(simulation.pool_tasks(), 0);
        let drained = serving.drain(None);
        serving.expire(None);
        drained.await;
        assert_eq!(simulation.pool_tasks(), 1);
        assert!(other.try_lock().is_err());
        seconds(1).await;
        assert!(other.try_lock().is_ok());
    });
    std::fs::remove_file(path).expect("ours");
}

#[test]
fn lock_of_which_a_share_is_kept_outlives_the_service() {
    let path = lock_path("kept");
    run(&format!("service one keeps lock={};", path.display()), async |_, serving| {
        seconds(5).await;
        let share = KEPT.take().expect("it is exclusive");
        let other = Arc::new(LockFile::open(&path).expect("it is there"));
        assert!(other.try_lock().is_err());
        serving.drain(None).await;
        seconds(60).await;
        assert!(other.try_lock().is_err());
        drop(share);
        seconds(1).await;
        assert!(other.try_lock().is_ok());
    });
    std::fs::remove_file(path).expect("ours");
}

#[test]
fn exclusive_service_runs_in_one_of_two_servers_despite_faults() {
    each_seed(20, |simulation| {
        begin_record();
        let random = Random::new(simulation.seed());
        simulation.set_faults(Faults::swarm(&random));
        let lock = lock_path("service");
        let services = format!("service one every lock={};", lock.display());
        let (old, new) = (site(simulation, &services), site(simulation, &services));
        old.run(LoopOptions::default(), async |serving| {
            let tasks = task_count();
            seconds(5).await;
            let mut second = new.start(new.build());
            second.settled();
            for _ in 0..random.up_to(4) {
                sleep(Duration::from_millis(random.below(15_000))).await;
                reload(&old, serving, &services).await;
            }
            serving.drain(None).await;
            recorded();
            seconds(60).await;
            let runs = recorded().iter().filter(|(_, what)| what.starts_with("one ")).count();
            assert!(runs >= 4, "seed {}: the other has not taken over", simulation.seed());
            second.drain(None).await;
            assert!(ALIVE.with_borrow(Vec::is_empty));
            assert!(!HAS_OVERLAPPED.get(), "seed {}", simulation.seed());
            seconds(10).await;
            assert!(task_count() < tasks, "seed {}: tasks are left", simulation.seed());
        });
        std::fs::remove_file(lock).expect("ours");
    });
}
