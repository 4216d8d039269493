//! test_service: a service for tests of the whole program, built only with the feature `test-hooks`.
//!   test_service NAME [PARAMETER …];   main    logs at each run the number of runs so far
//!
//! Parameters: `period=TIME` between two runs (10s); `text=TEXT`, which is logged; `per=worker`; `lock=PATH`, in place
//! of `per`; `continues`: over a reload; `panics=N`: in the Nth run; `stuck`: never ends by itself; `on=reload`: runs
//! at reloads only; `zone=NAME:SIZE`: keeps its count in this zone, shared with all services that name it.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bstr::ByteSlice;
use gale_base::log_level::Level;
use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, Statement, Takes};
use gale_engine::configuration::{Builder, ZoneSize};
use gale_engine::module::{Directive, Module};
use gale_worker::service::{Context, Service, ServiceSpec};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "test_service",
    directives: &[Directive {
        name: "test_service",
        contexts: Contexts::MAIN,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "For tests: a service that writes a line to the error log now and then.",
        store: &Custom(|_: &mut (), builder: &mut Builder, statement| add(builder, statement)),
    }],
    ..Module::EMPTY
};

struct TestService {
    period: Duration,
    text: String,
    continues: bool,
    panics_at: Option<u64>,
    is_stuck: bool,
    runs_on_reload: bool,
    zone: Option<Arc<AtomicU64>>,
}

fn add(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let mut service = TestService {
        period: Duration::from_secs(10),
        text: String::new(),
        continues: false,
        panics_at: None,
        is_stuck: false,
        runs_on_reload: false,
        zone: None,
    };
    let (mut is_per_worker, mut lock) = (false, None);
    for word in &statement.args[1..] {
        let invalid = || Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span);
        match word.text.split_once_str("=").unwrap_or((&word.text, b"")) {
            (b"period", time) => {
                service.period = units::parse_time(time).ok_or_else(invalid)?;
            }
            (b"text", text) => service.text = text.to_str_lossy().into_owned(),
            (b"per", b"worker") => is_per_worker = true,
            (b"lock", path) => lock = Some(builder.full_path(path)),
            (b"continues", _) => service.continues = true,
            (b"panics", number) => service.panics_at = Some(units::parse_number(number).ok_or_else(invalid)?),
            (b"stuck", _) => service.is_stuck = true,
            (b"on", b"reload") => service.runs_on_reload = true,
            (b"zone", text) => {
                let size = ZoneSize::parse(word, text)?;
                let zone = size.hold(builder, "test_service", statement.span, |_| AtomicU64::new(0))?;
                builder
                    .declare_zone::<Arc<AtomicU64>>("test_service", &size, statement.span)?
                    .declare(Arc::clone(&zone));
                service.zone = Some(zone);
            }
            _ => return Err(invalid()),
        }
    }
    let name = statement.args[0].text.to_string();
    let spec = match lock {
        Some(path) => ServiceSpec::exclusive(name, path, service),
        None if is_per_worker => ServiceSpec::per_worker(name, service),
        None => ServiceSpec::per_process(name, service),
    };
    builder.add_service(spec, statement.span)
}

impl Service for TestService {
    async fn run(context: Context<Self>) {
        let told = Told { context, runs: Cell::new(0) };
        let context = &told.context;
        let settings = context.settings();
        if settings.runs_on_reload {
            while context.unless_stopping(context.changed()).await.is_some() {
                told.run();
            }
            return;
        }
        context.every(settings.period, async || told.run()).await;
        if settings.is_stuck {
            std::future::pending().await
        }
    }

    fn continues(&self, _earlier: &Self) -> bool {
        self.continues
    }
}

/// Logs the progress of the service and, when dropped, its end.
struct Told {
    context: Context<TestService>,
    runs: Cell<u64>,
}

impl Told {
    fn run(&self) {
        let settings = self.context.settings();
        let own = self.runs.get() + 1;
        self.runs.set(own);
        let runs = settings.zone.as_ref().map_or(own, |zone| zone.fetch_add(1, Ordering::Relaxed) + 1);
        let (worker, text) = (gale_runtime::worker(), &settings.text);
        self.context.log(Level::Notice, format_args!("run {runs} on worker {worker} {text}"));
        assert!(settings.panics_at != Some(own), "a test wanted it in a service");
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.context.log(Level::Notice, "ended");
    }
}
