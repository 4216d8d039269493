//! The helper of a reload: parses, resolves, opens, hands the bundle over, exits.
//!
//! It may take its time and may fail in any way; the master waits for nothing but its messages.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::bundle::Bundle;
use super::errors::{ErrorLog, Level, Report};
use super::link::{Link, Message, Received};
use super::program::{BuildRequest, Built, Program};
use super::system::SystemResources;

/// Longest wait for the master, which only has to send and to read.
const MASTER_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs the helper on the link to its master.
pub(super) fn run<P: Program>(program: &P, link: Link) -> ExitCode {
    let link = Arc::new(Mutex::new(link));
    match serve(program, &link) {
        Ok(()) => ExitCode::SUCCESS,
        // Without the master there is nobody to tell.
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
    let resources = SystemResources::new(log).with_existing(open.record.listeners);
    // Sockets that the new configuration does not take over are closed here, before the master hears of it: a copy in this
    // process must not keep a removed address open.
    let built = build(program, request, resources);

    let mut link = link.lock();
    match built {
        Ok((bundle, built)) => {
            for entry in &built.warnings.entries {
                link.send_log(entry.level, &entry.message)?;
            }
            link.send_bundle(&bundle)?;
        }
        Err(report) => link.send(&Message::Refused { generation: 0, report: report.bounded() })?,
    }
    link.drain(Instant::now() + MASTER_TIMEOUT)
}

/// Builds from the system and makes a bundle of it. A failed build leaves no new socket file behind.
pub(super) fn build<P: Program>(
    program: &P,
    request: BuildRequest,
    mut resources: SystemResources,
) -> Result<(Bundle, Built<P::Configuration>), Report> {
    match guarded(|| program.build(&request, &mut resources)) {
        Ok(built) => {
            let settings = program.process_settings(&built.configuration).clone();
            Ok((resources.into_bundle(request, settings), built))
        }
        Err(report) => {
            resources.abandon();
            Err(report)
        }
    }
}

/// Runs a build, panics included.
pub(super) fn guarded<T>(build: impl FnOnce() -> Result<T, Report>) -> Result<T, Report> {
    catch_unwind(AssertUnwindSafe(build)).unwrap_or_else(|_| {
        Err(Report::new(Level::Emerg, "the configuration could not be built: internal error (panic)"))
    })
}

/// Lines go to the master, whose log it is.
struct ForwardingLog {
    link: Arc<Mutex<Link>>,
}

impl ErrorLog for ForwardingLog {
    fn write(&self, level: Level, message: &str) {
        // A lost master is noticed when the bundle is sent.
        let _ = self.link.lock().send_log(level, message);
    }
}
