//! core: the processes, their files and their error log.
//!   main:
//!     daemon, debug_points, env, error_log, load_module, lock_file, master_process, pcre_jit, pid, sandbox,
//!     ssl_engine, thread_pool, timer_resolution, user, worker_cpu_affinity, worker_priority, worker_processes,
//!     worker_rlimit_core, worker_rlimit_nofile, worker_shutdown_timeout, working_directory
//!   any:
//!     include
//! (<https://nginx.org/en/docs/ngx_core_module.html>)

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use bstr::{BStr, ByteSlice};
use gale_base::log_level::{Level, LineForm};
use gale_base::units;
use gale_config::{
    Body, Contexts, Custom, Diagnostic, Inert, InertValue, Many, ManyWith, One, OneWith, Statement, Takes, Word, slot,
    values,
};
use gale_engine::configuration::{Builder, CpuAffinity, MainSettings, SandboxSettings, ThreadPoolSettings};
use gale_engine::module::{ConfType, Directive, Module};
use gale_log::{Destination, Target};
use gale_process::{EnvironmentEntry, SandboxMode};
use gale_runtime::affinity::PROCESSORS_MAX;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "core",
    directives: DIRECTIVES,
    conf: Some(ConfType { complete_main, ..ConfType::of::<MainSettings>() }),
    ..Module::EMPTY
};

/// Largest accepted number of workers. A larger one is a typing error; the process layer has the same limit.
const WORKERS_MAX: u64 = 512;

const DIRECTIVES: &[Directive] = &[
    Directive {
        name: "user",
        contexts: Contexts::MAIN,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "",
        about: "Sets the user and group of the worker process if the master process runs as root; the user nobody by \
                default.",
        store: &One { parse: user, slot: slot!(MainSettings, user) },
    },
    Directive {
        name: "worker_processes",
        contexts: Contexts::MAIN,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1",
        about: "Sets the number of workers, which are event loops in one process; auto starts one per CPU.",
        store: &One { parse: worker_processes, slot: slot!(MainSettings, worker_processes) },
    },
    Directive {
        name: "worker_rlimit_nofile",
        contexts: Contexts::MAIN,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Sets the limit on open files (RLIMIT_NOFILE) of the worker process.",
        store: &One { parse: values::number, slot: slot!(MainSettings, worker_rlimit_nofile) },
    },
    Directive {
        name: "ssl_engine",
        contexts: Contexts::MAIN,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Not supported: engines belong to OpenSSL, which Gale does not use.",
        store: &Custom(|_: &mut (), _, statement| {
            Err(crate::shared::ssl::refused(statement, "engines belong to OpenSSL, which Gale does not use"))
        }),
    },
    Directive {
        name: "worker_rlimit_core",
        contexts: Contexts::MAIN,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Sets the limit on the size of a core file (RLIMIT_CORE) of the worker process.",
        store: &One { parse: values::offset, slot: slot!(MainSettings, worker_rlimit_core) },
    },
    Directive {
        name: "worker_priority",
        contexts: Contexts::MAIN,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "0",
        about: "Sets the scheduling priority (nice value) of the worker process.",
        store: &One { parse: priority, slot: slot!(MainSettings, worker_priority) },
    },
    Directive {
        name: "worker_shutdown_timeout",
        contexts: Contexts::MAIN,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Sets the time after which a graceful shutdown closes the connections that are still open.",
        store: &One { parse: values::time_ms, slot: slot!(MainSettings, worker_shutdown_timeout) },
    },
    Directive {
        name: "working_directory",
        contexts: Contexts::MAIN,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Sets the working directory of the worker process, in which core files are written.",
        store: &One { parse: values::path, slot: slot!(MainSettings, working_directory) },
    },
    Directive {
        name: "sandbox",
        contexts: Contexts::MAIN,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "auto",
        about: "Restricts the worker process: auto as far as the kernel can and no site notices, on completely or not \
                at all; diagnose names a forbidden system call.",
        store: &One { parse: sandbox, slot: slot!(MainSettings, sandbox) },
    },
    Directive {
        name: "env",
        contexts: Contexts::MAIN,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Keeps or sets an environment variable of the worker process; TZ is always kept.",
        store: &Many { parse: environment, slot: slot!(MainSettings, env) },
    },
    Directive {
        name: "daemon",
        contexts: Contexts::MAIN,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Enables or disables running in the background.",
        store: &One { parse: values::flag, slot: slot!(MainSettings, daemon) },
    },
    Directive {
        name: "master_process",
        contexts: Contexts::MAIN,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Enables or disables the master process, which supervises the worker process; off is for development.",
        store: &One { parse: values::flag, slot: slot!(MainSettings, master_process) },
    },
    Directive {
        name: "pid",
        contexts: Contexts::MAIN,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Sets the file that stores the process ID of the master process; -V shows the default.",
        store: &OneWith { parse: full_path, slot: slot!(MainSettings, pid) },
    },
    Directive {
        name: "worker_cpu_affinity",
        contexts: Contexts::MAIN,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "Binds each worker (event loop) to CPUs: a mask for each worker, or auto for one CPU each.",
        store: &One { parse: cpu_affinity, slot: slot!(MainSettings, worker_cpu_affinity) },
    },
    Directive {
        name: "lock_file",
        contexts: Contexts::MAIN,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        // nginx's default is "logs/nginx.lock".
        about: "No effect: workers are threads and need no lock files.",
        store: &OneWith { parse: full_path, slot: slot!(MainSettings, lock_file) },
    },
    Directive {
        name: "error_log",
        contexts: Contexts::MAIN,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "Sets the destination, minimum level and format of the error log; may be repeated. Default: the file \
                given by -e or shown by -V, level error.",
        store: &ManyWith { parse: error_log, slot: slot!(MainSettings, error_log) },
    },
    Directive {
        name: "thread_pool",
        contexts: Contexts::MAIN,
        takes: Takes::Between(2, 3),
        body: Body::None,
        default: "default threads=32 max_queue=65536",
        about: "Defines a pool of threads for operations that may block: NAME threads=N [max_queue=N].",
        store: &Custom(thread_pool),
    },
    Directive {
        store: &InertValue(values::time_ms),
        ..inert(
            "timer_resolution",
            Takes::Exactly(1),
            "No effect: the clock is read twice in each turn of an event loop.",
        )
    },
    inert("pcre_jit", Takes::Flag, "No effect: regular expressions are always compiled to machine code."),
    inert("debug_points", Takes::Exactly(1), "No effect: internal errors never stop the process for a debugger."),
    inert("load_module", Takes::Exactly(1), "No effect: modules are built in."),
];

const fn inert(name: &'static str, takes: Takes, about: &'static str) -> Directive {
    Directive { name, contexts: Contexts::MAIN, takes, body: Body::None, default: "", about, store: &Inert }
}

fn complete_main(conf: &mut dyn std::any::Any, builder: &mut Builder) -> Result<(), Diagnostic> {
    let main: &mut MainSettings = conf.downcast_mut().expect("the core module's settings");
    if !main.pid.is_set() {
        main.pid.set(builder.default_pid_path(), None);
    }
    if main.sandbox.get().mode == SandboxMode::On && !*main.master_process.get() {
        return Err(main.sandbox.error("\"sandbox on\" needs \"master_process on\""));
    }
    if !main.thread_pool.is_set() {
        main.thread_pool.set(Vec::new(), None);
    }
    if let (Some(CpuAffinity::Masks(masks)), Some(&workers)) =
        (main.worker_cpu_affinity.get_opt(), main.worker_processes.get_opt())
        && masks.len() != 1
        && masks.len() != workers
    {
        let message = "the number of \"worker_processes\" is not equal to the number of \"worker_cpu_affinity\" masks, \
                       using last mask for remaining worker processes";
        builder.note([Diagnostic::warn(message)]);
    }
    if main.error_log.get().is_empty() {
        let target = match builder.error_log_path.clone() {
            Some(path) if path.as_os_str() == "stderr" => Target::Stderr,
            path => {
                let path = path.unwrap_or_else(|| builder.default_error_log_path());
                Target::File(builder.log_file(path.as_os_str().as_encoded_bytes(), None))
            }
        };
        main.error_log.set(vec![Destination { level: Level::Error, form: LineForm::Text, target }], None);
    }
    Ok(())
}

fn user(statement: &Statement) -> Result<(String, Option<String>), Diagnostic> {
    let text = |word: &Word| match word.text.to_str() {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => Err(Diagnostic::emerg(format!("getpwnam(\"{}\") failed", word.text)).at(word.span)),
    };
    let group = statement.args.get(1).map(text).transpose()?;
    Ok((text(&statement.args[0])?, group))
}

fn worker_processes(statement: &Statement) -> Result<usize, Diagnostic> {
    let word = &statement.args[0];
    if word.text == "auto" {
        return Ok(std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    }
    let invalid = || statement.directive_error("invalid value").at(word.span);
    match units::parse_number(&word.text) {
        Some(0) => Err(invalid().hint("at least one worker is needed; auto starts one per CPU")),
        Some(number) if number <= WORKERS_MAX => Ok(usize::try_from(number).unwrap_or(1)),
        Some(_) => Err(invalid().hint(format!("at most {WORKERS_MAX} workers"))),
        None => Err(invalid().hint("a number, or auto")),
    }
}

fn sandbox(statement: &Statement) -> Result<SandboxSettings, Diagnostic> {
    let modes = [SandboxMode::Auto, SandboxMode::On, SandboxMode::Off].map(|mode| (mode.name(), mode));
    let mode = values::choice(&statement.args[0], &modes)?;
    let extra = statement.args.get(1);
    match extra {
        Some(word) if word.text != "diagnose" || mode == SandboxMode::Off => {
            Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span))
        }
        _ => Ok(SandboxSettings { mode, diagnoses: extra.is_some() }),
    }
}

fn cpu_affinity(statement: &Statement) -> Result<CpuAffinity, Diagnostic> {
    let masks = |words: &[Word]| words.iter().map(processors).collect::<Result<Vec<_>, _>>();
    match &*statement.args {
        [auto, rest @ ..] if auto.text == "auto" => match rest {
            [] | [_] => Ok(CpuAffinity::Auto(masks(rest)?.pop())),
            [_, _, ..] => Err(statement.error("invalid number of arguments in \"worker_cpu_affinity\" directive")),
        },
        words => Ok(CpuAffinity::Masks(masks(words)?)),
    }
}

/// Parses a mask of zeros and ones, whose last digit is the first processor; spaces may separate digits.
fn processors(word: &Word) -> Result<Vec<usize>, Diagnostic> {
    let digits: Vec<u8> = word.text.iter().copied().filter(|&byte| byte != b' ').collect();
    if digits.len() > PROCESSORS_MAX {
        let message = format!("\"worker_cpu_affinity\" supports up to {PROCESSORS_MAX} CPUs only");
        return Err(Diagnostic::emerg(message).at(word.span));
    }
    if let Some(other) = digits.iter().find(|byte| !matches!(byte, b'0' | b'1')) {
        let message = format!("invalid character \"{}\" in \"worker_cpu_affinity\"", char::from(*other));
        return Err(Diagnostic::emerg(message).at(word.span));
    }
    let has_one = |&(_, digit): &(usize, &u8)| *digit == b'1';
    Ok(digits.iter().rev().enumerate().filter(has_one).map(|(processor, _)| processor).collect())
}

fn priority(statement: &Statement) -> Result<i32, Diagnostic> {
    let value = values::signed_number(statement)?;
    i32::try_from(value).ok().filter(|value| (-20..=19).contains(value)).ok_or_else(|| {
        statement.error(format!("invalid number \"{value}\"")).hint("a nice value is between -20 and 19")
    })
}

fn environment(statement: &Statement) -> Result<EnvironmentEntry, Diagnostic> {
    let text: &[u8] = &statement.args[0].text;
    let os = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    Ok(match text.split_once_str("=") {
        Some((name, value)) => EnvironmentEntry { name: os(name), value: Some(os(value)) },
        None => EnvironmentEntry { name: os(text), value: None },
    })
}

fn full_path(builder: &mut Builder, statement: &Statement) -> Result<PathBuf, Diagnostic> {
    Ok(builder.full_path(&statement.args[0].text))
}

/// Parses `error_log FILE|stderr|syslog:… [LEVEL] [json]`, which has the same syntax in all contexts.
pub fn error_log(builder: &mut Builder, statement: &Statement) -> Result<Destination, Diagnostic> {
    let (level, form) = level_and_form(&statement.args[1..])?;
    let target = error_log_target(builder, &statement.args[0])?;
    Ok(Destination { level, form, target })
}

fn level_and_form(words: &[Word]) -> Result<(Level, LineForm), Diagnostic> {
    let wrong = |what: &str, word: &Word| Err(Diagnostic::emerg(format!("{what} \"{}\"", word.text)).at(word.span));
    let (mut level, mut form) = (None, LineForm::Text);
    for word in words {
        if word.text == "json" {
            if form == LineForm::Json {
                return wrong("duplicate parameter", word);
            }
            form = LineForm::Json;
            continue;
        }
        // Several of nginx's `debug_http` and the like may follow each other.
        let is_part = word.text.starts_with(b"debug_");
        match level.replace(log_level(word)?) {
            None => {}
            Some(Level::Debug) if is_part => {}
            Some(_) if is_part => return wrong("invalid log level", word),
            Some(_) => return wrong("duplicate log level", word),
        }
    }
    Ok((level.unwrap_or(Level::Error), form))
}

fn error_log_target(builder: &mut Builder, word: &Word) -> Result<Target, Diagnostic> {
    let text: &[u8] = &word.text;
    // As in nginx, an empty name means standard error, too.
    if matches!(text, b"stderr" | b"") {
        builder.logs_to_stderr = true;
        return Ok(Target::Stderr);
    }
    if text.starts_with(b"syslog:") {
        return Ok(Target::Syslog(builder.syslog(word)?));
    }
    if text.starts_with(b"memory:") {
        // nginx supports it in debug builds only.
        let message = format!("\"{}\" is not supported in \"error_log\" directive", BStr::new(text));
        return Err(Diagnostic::emerg(message).at(word.span).hint("a log in memory exists only for debugging nginx"));
    }
    Ok(Target::File(builder.log_file(text, Some(word.span))))
}

/// Parses a level: `debug … emerg`.
pub(crate) fn log_level(word: &Word) -> Result<Level, Diagnostic> {
    const LEVELS: [Level; 8] =
        [Level::Emerg, Level::Alert, Level::Crit, Level::Error, Level::Warn, Level::Notice, Level::Info, Level::Debug];
    // nginx's `debug_http` and the like select a part of the debug messages.
    if word.text.starts_with(b"debug_") {
        return Ok(Level::Debug);
    }
    let found = LEVELS.into_iter().find(|level| word.text == level.name());
    found.ok_or_else(|| Diagnostic::emerg(format!("invalid log level \"{}\"", word.text)).at(word.span))
}

fn thread_pool(main: &mut MainSettings, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let name = statement.args[0].text.to_string();
    let mut pools = main.thread_pool.take().unwrap_or_default();
    let is_duplicate = pools.iter().any(|other| other.name == name);
    let parsed = if is_duplicate {
        Err(statement.error(format!("duplicate thread pool \"{name}\"")))
    } else {
        parse_thread_pool(builder, statement, name).map(|pool| pools.push(pool))
    };
    main.thread_pool.set(pools, Some(statement.span));
    parsed
}

fn parse_thread_pool(
    builder: &mut Builder,
    statement: &Statement,
    name: String,
) -> Result<ThreadPoolSettings, Diagnostic> {
    let mut pool = ThreadPoolSettings { name, threads: 0, ..ThreadPoolSettings::default() };
    for word in &statement.args[1..] {
        let invalid = |what| Diagnostic::emerg(format!("invalid {what} value \"{}\"", word.text)).at(word.span);
        let number = |text: &[u8]| units::parse_number(text).and_then(|number| usize::try_from(number).ok());
        if let Some(text) = word.text.strip_prefix(b"threads=") {
            pool.threads = number(text).filter(|&threads| threads > 0).ok_or_else(|| invalid("threads"))?;
        } else if let Some(text) = word.text.strip_prefix(b"max_queue=") {
            pool.max_queue = number(text).ok_or_else(|| invalid("max_queue"))?;
        } else {
            // nginx ignores unknown parameters here.
            let warning = Diagnostic::warn(format!("invalid parameter \"{}\", ignored", word.text)).at(word.span);
            builder.note([warning]);
        }
    }
    if pool.threads == 0 {
        return Err(statement.error("\"thread_pool\" must have \"threads\" parameter"));
    }
    Ok(pool)
}
