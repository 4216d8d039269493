//! The web server in a simulated world: built from a configuration's text, served by one loop on which nothing is real.
//!
//! Of the machine it uses a directory for bodies of requests that do not fit memory, and `/dev/null` for logs.

#![allow(dead_code, reason = "not every test program uses all of it")]

pub mod answer;
pub mod requests;

use std::cell::RefCell;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gale_config::{Files, MemoryFiles};
use gale_engine::process::{
    Account, BuildRequest, ListenAddress, ListenSpec, Listener, ListenerHandle, LogFile, LogHandle, Program,
    ResourceError, Resources, Seat,
};
use gale_engine::serve::{Server, Serving};
use gale_modules::order::ORDER;
use gale_runtime::simulation::Simulation;
use gale_runtime::{EventLoop, LoopOptions, SocketAddress, spawn};

/// Where the server of every test listens.
pub fn address() -> SocketAddress {
    SocketAddress::Inet(ADDRESS.parse().expect("an address"))
}

pub const ADDRESS: &str = "192.0.2.1:80";

/// Runs `main` beside a server with this configuration; `%ADDRESS%` and `%TEMP%` are replaced in it.
pub fn run<T>(simulation: &Simulation, configuration: &str, main: impl AsyncFnOnce(&mut Serving) -> T) -> T {
    run_with(simulation, configuration, LoopOptions::default(), main)
}

/// As [`run`], on a loop with these options.
pub fn run_with<T>(
    simulation: &Simulation,
    configuration: &str,
    options: LoopOptions,
    main: impl AsyncFnOnce(&mut Serving) -> T,
) -> T {
    let server = Server::new(&ORDER);
    let temp = temporary_directory().display().to_string();
    let request = BuildRequest {
        program: "gale".to_owned(),
        prefix: "/".into(),
        configuration_path: "/gale.conf".into(),
        configuration_text: Some(configuration.replace("%ADDRESS%", ADDRESS).replace("%TEMP%", &temp)),
        ..BuildRequest::default()
    };
    let mut resources = SimulatedResources { simulation, files: MemoryFiles::default() };
    let built = server.build(&request, &mut resources).unwrap_or_else(|report| panic!("{}", report.render("gale")));
    let configuration = Arc::new(built.configuration);
    let mut event_loop = EventLoop::simulated(simulation, options).expect("a descriptor");
    event_loop.run(async {
        let seat = Seat { worker: 0, workers: 1 };
        let mut serving = server.start(seat, configuration).expect("simulated sockets can be accepted from");
        main(&mut serving).await
    })
}

/// Goes away with the directory of the system's temporary files; nothing in it keeps a name.
fn temporary_directory() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        let path = std::env::temp_dir().join(format!("gale-simulated-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory for temporary files");
        path
    })
}

/// Listening sockets of the simulation, and as little else as possible.
struct SimulatedResources<'s> {
    simulation: &'s Simulation,
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
        let listen = |spec: &ListenSpec| {
            let address = match &spec.address {
                ListenAddress::Inet(address) => SocketAddress::Inet(*address),
                ListenAddress::Unix(path) => SocketAddress::unix(path),
            };
            let socket = self.simulation.listen(&address).map_err(|error| ResourceError::new(error.to_string()))?;
            Ok(Arc::new(Listener { spec: spec.clone(), sockets: vec![Arc::new(socket)], inherited: false }))
        };
        specs.iter().map(listen).collect()
    }

    /// All of them are the same one, opened once: a log has a place in the process for ever.
    fn log_file(&mut self, _path: &Path) -> Result<LogHandle, ResourceError> {
        static LOG: OnceLock<LogHandle> = OnceLock::new();
        Ok(Arc::clone(LOG.get_or_init(|| {
            let path = std::env::var_os("GALE_SIMULATED_LOG").map_or(PathBuf::from("/dev/null"), PathBuf::from);
            Arc::new(LogFile::open(&path).expect("a log"))
        })))
    }

    fn secret(&mut self, _path: &Path) -> io::Result<Vec<u8>> {
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

    /// Waits for the task; not for ever, because it may have panicked.
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
