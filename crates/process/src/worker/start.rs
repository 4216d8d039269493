//! Start of a worker process: receives its bundle, becomes the worker (limits, user, directory), builds the
//! configuration, then runs the control thread.
//!
//! A failure is reported over the link with its reason and ends the process. The user changes before the first thread
//! is started.

use gale_base::log_level::Level;
use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::CapabilitySet;

use super::link::NO_ROOM;
use super::{Control, EXIT_FATAL, Origin, Single};
use crate::bundle::Bundle;
use crate::errors::{ErrorLog, KeptLog, Report, errno_text, say};
use crate::helper;
use crate::link::{Link, Message, Received};
use crate::program::Program;
use crate::sandbox::OpenPlace;
use crate::settings::ProcessSettings;
use crate::signals::Signals;

/// Maximum wait for the first bundle.
const BUNDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs the worker process on the link to its master.
pub(crate) fn run<P: Program>(program: P, signals: Signals, mut link: Link) -> ExitCode {
    // Only cosmetic: the name in `ps -L` and `top`.
    let _ = rustix::thread::set_name(c"gale worker");
    let mut bundle = match wait_for_bundle(&program, &mut link) {
        Ok(Received::Bundle(bundle)) => bundle,
        other => {
            let why = match other {
                Ok(Received::BundleLost { .. }) => NO_ROOM.to_owned(),
                Ok(_) => "unexpected message from the master process".to_owned(),
                Err(error) => format!("no configuration was received from the master process: {error}"),
            };
            let refused = Message::Refused { generation: 0, report: Report::new(Level::Emerg, &why).bounded() };
            if link.send(&refused).is_err() {
                say(&format!("worker process: [emerg] {why}\n"));
            }
            return ExitCode::from(EXIT_FATAL);
        }
    };
    let generation = bundle.generation;
    let log = program.error_log(&bundle.error_log_targets());
    let prepared = prepare(&program, &mut bundle, &*log);
    match prepared {
        Ok(configuration) => {
            match Control::new(program, signals, Arc::clone(&log), *bundle, configuration, Origin::Master(Some(link))) {
                Ok(control) => control.run(),
                Err(error) => {
                    log.write(Level::Emerg, &format!("the worker process could not be set up{}", errno_text(&error)));
                    ExitCode::from(EXIT_FATAL)
                }
            }
        }
        Err(report) => {
            report.log_to(&*log);
            let _ = link.send(&Message::Refused { generation, report: report.bounded() });
            let _ = link.drain(Instant::now() + BUNDLE_TIMEOUT);
            program.finish();
            ExitCode::from(EXIT_FATAL)
        }
    }
}

/// Returns the first bundle or the unexpected message received instead. Secrets precede it.
fn wait_for_bundle<P: Program>(program: &P, link: &mut Link) -> io::Result<Received> {
    let deadline = Instant::now() + BUNDLE_TIMEOUT;
    loop {
        match link.wait(deadline)? {
            Received::Message(Message::Secrets { series }) => program.use_secrets(&series),
            received => return Ok(received),
        }
    }
}

/// Runs everything in this process: `master_process off`.
pub(crate) fn run_single<P: Program>(
    program: P,
    signals: Signals,
    bundle: Bundle,
    configuration: P::Configuration,
    single: Single,
) -> ExitCode {
    let log = program.error_log(&bundle.error_log_targets());
    allow_core_files(&bundle.settings, &*log);
    match Control::new(program, signals, Arc::clone(&log), bundle, configuration, Origin::Single(single)) {
        Ok(control) => control.run(),
        Err(error) => {
            log.write(Level::Emerg, &format!("the process could not be set up{}", errno_text(&error)));
            ExitCode::FAILURE
        }
    }
}

/// Maximum number of descriptors to reserve. The kernel uses 8 bytes for each: half a megabyte.
const DESCRIPTORS_RESERVED_MAX: u64 = 65_536;

/// Becomes the worker: limits, user, directory, sandbox; then builds. The user and its rights change before the first
/// thread.
fn prepare<P: Program>(program: &P, bundle: &mut Bundle, log: &dyn ErrorLog) -> Result<P::Configuration, Report> {
    let emerg = |message: String| Report::new(Level::Emerg, message);
    let kept = KeptLog::default();
    let places = std::mem::take(&mut bundle.record.places);
    let became = become_worker(&bundle.settings, places, &kept);
    kept.pass_on(log);
    became.map_err(emerg)?;
    // On its own thread, as in a reload: the allocator can then reuse the memory of this build for the next one.
    let built = thread::scope(|scope| {
        let build = || helper::guarded(|| program.build(&bundle.request, &mut bundle.resources()));
        let builder = thread::Builder::new().name("builder".into()).spawn_scoped(scope, build);
        let builder = builder.map_err(|error| emerg(format!("pthread_create() failed{}", errno_text(&error))))?;
        builder.join().map_err(|_| emerg("the builder thread panicked".to_owned()))?
    })?;
    Ok(built.configuration)
}

fn become_worker(settings: &ProcessSettings, places: Vec<OpenPlace>, log: &dyn ErrorLog) -> Result<(), String> {
    if settings.priority != 0
        && let Err(error) = rustix::process::setpriority_process(None, settings.priority)
    {
        let why = errno_text(&error.into());
        log.write(Level::Alert, &format!("setpriority({}) failed{why}", settings.priority));
    }
    if let Some(limit) = settings.rlimit_nofile {
        limit_descriptors(limit, log);
    }
    reserve_descriptors();
    allow_core_files(settings, log);
    if let Some(account) = &settings.account {
        let kept = if settings.keep_net_raw { CapabilitySet::NET_RAW } else { CapabilitySet::empty() };
        account.assume(kept)?;
    }
    // A change of user forbids core dumps until they are allowed again.
    if let Err(error) = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable) {
        log.write(Level::Alert, &format!("prctl(PR_SET_DUMPABLE) failed{}", errno_text(&error.into())));
    }
    if let Some(directory) = &settings.working_directory {
        std::env::set_current_dir(directory)
            .map_err(|error| format!("chdir(\"{}\") failed{}", directory.display(), errno_text(&error)))?;
    }
    // Child processes gain no privileges, with a sandbox or without.
    rustix::thread::set_no_new_privs(true)
        .map_err(|error| format!("prctl(PR_SET_NO_NEW_PRIVS) failed{}", errno_text(&error.into())))?;
    let dumps_core = settings.rlimit_core.is_some_and(|limit| limit > 1);
    settings.sandbox.enter(places, dumps_core, log)
}

/// Allows core files up to the configured size, after [`forbid_core_files`].
fn allow_core_files(settings: &ProcessSettings, log: &dyn ErrorLog) {
    let Some(limit) = settings.rlimit_core else { return };
    let limits = Rlimit { current: Some(limit), maximum: Some(limit) };
    if let Err(error) = rustix::process::setrlimit(Resource::Core, limits) {
        log.write(Level::Alert, &format!("setrlimit(RLIMIT_CORE, {limit}) failed{}", errno_text(&error.into())));
    }
}

/// Forbids core files of this process and its children, because they would contain the keys of certificates. The kernel
/// ignores a limit of 0 where it passes core files to a program (`kernel.core_pattern`, core(5)); a limit of one byte,
/// too small for any core file, forbids both kinds (`fs/coredump.c`).
pub(crate) fn forbid_core_files() {
    let limits = rustix::process::getrlimit(Resource::Core);
    let current = limits.maximum.map_or(1, |maximum| maximum.min(1));
    // Lowering a limit is always permitted.
    let _ = rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(current), ..limits });
}

pub(super) fn limit_descriptors(limit: u64, log: &dyn ErrorLog) {
    let limits = Rlimit { current: Some(limit), maximum: Some(limit) };
    if rustix::process::getrlimit(Resource::Nofile) == limits {
        return; // the master may have set it for us, which we might lack the permission for
    }
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, limits) {
        log.write(Level::Alert, &format!("setrlimit(RLIMIT_NOFILE, {limit}) failed{}", errno_text(&error.into())));
    }
    reserve_descriptors();
}

/// Has the kernel allocate its table of descriptors at full size. The kernel doubles the table when it is full; once
/// threads share it, the call that needs a descriptor (an accept, an open on an event loop) then waits for all
/// processors, some 20 ms (`synchronize_rcu` in `expand_files`).
fn reserve_descriptors() {
    let limit = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX).min(DESCRIPTORS_RESERVED_MAX);
    let last = i32::try_from(limit).map_or(0, |limit| limit - 1);
    // The descriptor is closed at once; the table never shrinks. If this fails, the table grows on demand.
    let _ = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), last);
}
