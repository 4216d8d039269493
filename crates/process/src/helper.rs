//! The helper process of a reload: parses, resolves names, opens resources, hands over the bundle, exits.
//!
//! It may block and may fail in any way; the master only waits for its messages.

use gale_base::log_level::Level;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::bundle::Bundle;
use super::errors::{ErrorLog, Report};
use super::link::{Link, Message, Received};
use super::program::{BuildRequest, Built, Program};
use super::system::{NewSocketFiles, SystemResources};

/// Maximum wait for the master, which only has to send and to read.
const MASTER_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs the helper on the link to its master.
pub(super) fn run<P: Program>(program: &P, link: Link) -> ExitCode {
    let link = Arc::new(Mutex::new(link));
    match serve(program, &link) {
        Ok(()) => ExitCode::SUCCESS,
        // Without the master the error cannot be reported.
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve<P: Program>(program: &P, link: &Arc<Mutex<Link>>) -> io::Result<()> {
    let deadline = Instant::now() + MASTER_TIMEOUT;
    let open = match link.lock().wait(deadline)? {
        Received::Bundle(bundle) => bundle,
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    let request = match link.lock().wait(deadline)? {
        Received::Message(Message::Build { request }) => request,
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    let log: Arc<dyn ErrorLog> = Arc::new(ForwardingLog { link: Arc::clone(link) });
    let resources = SystemResources::new(Arc::clone(&log)).with_existing(open.record.listeners);
    // Sockets that the new configuration does not take over are closed here, before the master gets the bundle: a copy
    // in this process must not keep a removed address open.
    let Fresh { bundle, built, socket_files } = match build(program, request, resources) {
        Ok(fresh) => fresh,
        Err(report) => {
            let mut link = link.lock();
            link.send(&Message::Refused { generation: 0, report: report.bounded() })?;
            return link.drain(Instant::now() + MASTER_TIMEOUT);
        }
    };
    let handed_over = hand_over(&mut link.lock(), bundle, &built.warnings);
    if handed_over.is_err() {
        // The master does not know of these files and never will.
        socket_files.remove(&*log);
    }
    handed_over
}

/// Returns when the master has the bundle and owns the files of its sockets.
fn hand_over(link: &mut Link, bundle: Bundle, warnings: &Report) -> io::Result<()> {
    let deadline = Instant::now() + MASTER_TIMEOUT;
    for entry in &warnings.entries {
        link.send_log(entry.level, &entry.message)?;
    }
    link.send_bundle(&bundle)?;
    link.drain(deadline)?;
    drop(bundle);
    match link.wait(deadline)? {
        Received::Message(Message::Taken) => Ok(()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Result of a build from the system.
pub(super) struct Fresh<C> {
    pub bundle: Bundle,
    pub built: Built<C>,
    /// Files to be removed if the bundle is not used after all.
    pub socket_files: NewSocketFiles,
}

/// Builds from the system and makes a bundle of the result. A failed build leaves no new socket file behind.
pub(super) fn build<P: Program>(
    program: &P,
    request: BuildRequest,
    mut resources: SystemResources,
) -> Result<Fresh<P::Configuration>, Report> {
    match guarded(|| program.build(&request, &mut resources)) {
        Ok(built) => {
            let mut settings = program.process_settings(&built.configuration).clone();
            let places = settings.sandbox.find_places();
            let socket_files = resources.new_socket_files();
            let mut bundle = resources.into_bundle(request, settings);
            bundle.record.places = places;
            Ok(Fresh { bundle, built, socket_files })
        }
        Err(report) => {
            resources.abandon();
            Err(report)
        }
    }
}

/// Runs a build; a panic becomes an error.
pub(super) fn guarded<T>(build: impl FnOnce() -> Result<T, Report>) -> Result<T, Report> {
    catch_unwind(AssertUnwindSafe(build)).unwrap_or_else(|_| {
        Err(Report::new(Level::Emerg, "the configuration could not be built: internal error (panic)"))
    })
}

/// Sends messages to the master, which writes the log.
struct ForwardingLog {
    link: Arc<Mutex<Link>>,
}

impl ErrorLog for ForwardingLog {
    fn write(&self, level: Level, message: &str) {
        // A lost master is noticed when the bundle is sent.
        let _ = self.link.lock().send_log(level, message);
    }
}
