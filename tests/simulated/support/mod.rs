//! The web server in a simulated world: built from a configuration's text and served by one simulated loop.
//!
//! It uses two real things: a directory below `target` for request bodies that do not fit memory, and `/dev/null` for
//! logs.

pub mod answer;
pub mod clients;
pub mod http2;
pub mod requests;

use std::cell::RefCell;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gale_config::{Files, MemoryFiles};
use gale_engine::configuration::Configuration;
use gale_engine::module::Order;
use gale_engine::serve::{Server, Serving};
use gale_modules::order::ORDER;
use gale_process::{
    Account, BuildRequest, DataHandle, ListenAddress, ListenSpec, Listener, ListenerHandle, LockFile, LockHandle,
    LogFile, LogHandle, Program, ResourceError, Resources, Worker, WorkerSlot,
};
use gale_runtime::simulation::{Random, Simulation};
use gale_runtime::{DriverChoice, EventLoop, LoopOptions, RingOptions, SocketAddress, spawn};

/// Listening address of the server of every test.
pub fn address() -> SocketAddress {
    SocketAddress::Inet(ADDRESS.parse().expect("an address"))
}

pub const ADDRESS: &str = "192.0.2.1:80";

/// Options of a loop whose driver depends on the seed: the simulated driver, or that of io_uring over a simulated ring
/// of any size.
pub fn loop_options(simulation: &Simulation) -> LoopOptions {
    let random = Random::new(simulation.seed());
    if random.chance(500) {
        return LoopOptions::default();
    }
    let ring = RingOptions {
        completions: *random.pick(&[4, 64, 4096]),
        buffers: *random.pick(&[0, 1, 4, 128]),
        buffer_bytes: *random.pick(&[64, 700, 4096]),
        multishot: random.chance(800),
        ..RingOptions::default()
    };
    let events_max = *random.pick(&[1, 7, 512]);
    LoopOptions { driver: DriverChoice::IoUring, ring, events_max, ..LoopOptions::default() }
}

/// Panics that tests cause on purpose. All worlds are threads of one process, which counts panics as a whole.
static EXPECTED_PANICS: AtomicU64 = AtomicU64::new(0);

/// Panics without being counted as a finding of the worlds that run at the same time.
pub fn panic_on_purpose(place: &str) -> ! {
    EXPECTED_PANICS.fetch_add(1, Ordering::SeqCst);
    panic!("a test wanted it {place}")
}

/// Number of panics that no test has caused on purpose.
pub fn unexpected_panics() -> u64 {
    let all = gale_runtime::panic_count();
    all.saturating_sub(EXPECTED_PANICS.load(Ordering::SeqCst))
}

/// Runs `main` beside a server with this configuration; `%ADDRESS%` and `%TEMP%` are replaced in it.
pub fn run<T>(simulation: &Simulation, configuration: &str, main: impl AsyncFnOnce(&mut Serving) -> T) -> T {
    let site = Site::new(simulation, configuration);
    site.run(loop_options(simulation), main)
}

/// A server before its start: the program, a configuration's text, and the open sockets that every configuration finds.
pub struct Site<'s> {
    simulation: &'s Simulation,
    server: Server,
    request: BuildRequest,
    listeners: RefCell<Vec<ListenerHandle>>,
}

fn replace_places(configuration: &str) -> String {
    configuration.replace("%ADDRESS%", ADDRESS).replace("%TEMP%", env!("CARGO_TARGET_TMPDIR"))
}

/// Slot of the only loop.
pub const SLOT: WorkerSlot = WorkerSlot { worker: 0, workers: 1 };

impl<'s> Site<'s> {
    pub fn new(simulation: &'s Simulation, configuration: &str) -> Site<'s> {
        Site::with_order(simulation, &ORDER, configuration)
    }

    /// A server with these modules.
    pub fn with_order(simulation: &'s Simulation, order: &'static Order, configuration: &str) -> Site<'s> {
        let text = replace_places(configuration);
        let request = BuildRequest {
            program: "gale".to_owned(),
            prefix: "/".into(),
            configuration_path: "/gale.conf".into(),
            configuration_text: Some(text),
            ..BuildRequest::default()
        };
        Site { simulation, server: Server::new(order), request, listeners: RefCell::default() }
    }

    /// Builds the configuration, as at the start and at every reload.
    pub fn build(&self) -> Arc<Configuration> {
        self.build_request(&self.request)
    }

    /// Builds a configuration of another text.
    pub fn build_text(&self, configuration: &str) -> Arc<Configuration> {
        let text = Some(replace_places(configuration));
        self.build_request(&BuildRequest { configuration_text: text, ..self.request.clone() })
    }

    /// Error with which a configuration of this text is refused.
    pub fn refusal(&self) -> String {
        let mut resources = SimulatedResources { site: self, files: MemoryFiles::default() };
        match self.server.build(&self.request, &mut resources) {
            Ok(_) => panic!("it is built"),
            Err(report) => report.render("gale"),
        }
    }

    fn build_request(&self, request: &BuildRequest) -> Arc<Configuration> {
        let mut resources = SimulatedResources { site: self, files: MemoryFiles::default() };
        let built = self.server.build(request, &mut resources);
        Arc::new(built.unwrap_or_else(|report| panic!("{}", report.render("gale"))).configuration)
    }

    /// Runs `main` beside the server, on a loop with these options.
    pub fn run<T>(&self, options: LoopOptions, main: impl AsyncFnOnce(&mut Serving) -> T) -> T {
        let configuration = self.build();
        let mut event_loop = EventLoop::simulated(self.simulation, options).expect("a descriptor");
        event_loop.run(async {
            let mut serving = self.start(configuration);
            serving.settled();
            main(&mut serving).await
        })
    }

    /// Begins to serve on the running loop. Services begin after `settled`.
    pub fn start(&self, configuration: Arc<Configuration>) -> Serving {
        self.server.start(SLOT, configuration).expect("simulated sockets can be accepted from")
    }

    fn listen(&self, spec: &ListenSpec) -> io::Result<ListenerHandle> {
        let mut listeners = self.listeners.borrow_mut();
        if let Some(known) = listeners.iter().find(|listener| listener.spec.address == spec.address) {
            return Ok(Arc::clone(known));
        }
        let address = match &spec.address {
            ListenAddress::Inet(address) => SocketAddress::Inet(*address),
            ListenAddress::Unix(path) => SocketAddress::unix(path),
        };
        let sockets = vec![Arc::new(self.simulation.listen(&address)?)];
        let listener = Arc::new(Listener { spec: spec.clone(), sockets, opened_by: gale_process::OpenedBy::Us });
        listeners.push(Arc::clone(&listener));
        Ok(listener)
    }
}

/// Listening sockets of the simulation, and as little else as possible.
struct SimulatedResources<'s> {
    site: &'s Site<'s>,
    files: MemoryFiles,
}

impl Files for SimulatedResources<'_> {
    fn read(&mut self, path: &Path) -> io::Result<Vec<u8>> {
        self.files.read(path)
    }

    fn glob(&mut self, pattern: &Path) -> io::Result<Vec<PathBuf>> {
        self.files.glob(pattern)
    }
}

impl Resources for SimulatedResources<'_> {
    fn listeners(&mut self, specs: &[ListenSpec]) -> Result<Vec<ListenerHandle>, ResourceError> {
        let listened = specs.iter().map(|spec| self.site.listen(spec));
        listened.collect::<io::Result<_>>().map_err(|error| ResourceError::new(error.to_string()))
    }

    /// All logs share one handle, opened once: a log is never freed in a process.
    fn log_file(&mut self, _path: &Path) -> Result<LogHandle, ResourceError> {
        static LOG: OnceLock<LogHandle> = OnceLock::new();
        Ok(Arc::clone(LOG.get_or_init(|| {
            let path = std::env::var_os("GALE_SIMULATED_LOG").map_or(PathBuf::from("/dev/null"), PathBuf::from);
            Arc::new(LogFile::open(&path).expect("a log"))
        })))
    }

    fn lock_file(&mut self, path: &Path) -> Result<LockHandle, ResourceError> {
        LockFile::open(path).map(Arc::new).map_err(|error| ResourceError::new(error.to_string()))
    }

    fn secret(&mut self, _path: &Path) -> io::Result<Vec<u8>> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn data_file(&mut self, _path: &Path) -> io::Result<DataHandle> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn resolve(&mut self, _host: &str) -> io::Result<Vec<IpAddr>> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn account(&mut self, _user: &str, _group: Option<&str>) -> Result<Option<Account>, ResourceError> {
        Ok(None)
    }

    fn directory(&mut self, _path: &Path, _owner: Option<&Account>) -> Result<(), ResourceError> {
        Ok(())
    }
}

/// A task whose result can be waited for.
pub struct Task<T>(Rc<RefCell<Option<T>>>);

impl<T: 'static> Task<T> {
    pub fn spawn(future: impl Future<Output = T> + 'static) -> Task<T> {
        let place = Rc::new(RefCell::new(None));
        let result = Rc::clone(&place);
        spawn(async move {
            let value = future.await;
            *result.borrow_mut() = Some(value);
        });
        Task(place)
    }

    /// Waits for the task up to a deadline, because the task may have panicked.
    pub async fn take(self) -> T {
        for _ in 0..200_000 {
            if let Some(result) = self.0.borrow_mut().take() {
                return result;
            }
            gale_runtime::sleep(Duration::from_millis(50)).await;
        }
        panic!("a task has not ended");
    }
}
