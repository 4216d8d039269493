//! Runs nginx's test suite against a binary, and compares the results with tests/nginx/expected.toml.
//!
//! The suite is a checkout given by its path; no part of it is copied into this repository. The exit status is 0 if
//! there are no regressions, 1 if there are some or a reason is missing, and 2 if the run failed.

mod expected;
mod report;
mod run;
mod suite;
mod tap;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::Ordering;
use std::time::Duration;

use self::expected::{Expectations, Seen, Status, Verdict};
use self::report::Report;
use self::run::{INTERRUPTED, Ran, Setup};
use self::suite::Suite;

const USAGE: &str = "\
usage: cargo xtask nginx-tests --suite PATH [OPTION…] [FILE | AREA | GLOB …]

  --suite PATH      a checkout of nginx's test suite
  --binary PATH     the binary to test (default: target/release/gale, else target/debug/gale)
  --jobs N          files at a time (default: the number of cores)
  --time-limit S    seconds for one file (default: 180)
  --modules DIR     folder of nginx's dynamic modules (TEST_NGINX_MODULES)
  --globals TEXT    directives for the main context (default as root: \"user root;\")
  --expected FILE   the expectations (default: tests/nginx/expected.toml)
  --update          write the results into the expectations, keeping the reasons
  --json FILE       write the results as JSON; - for the standard output
  --quiet           no line per file
  --list            list files and areas, run nothing
";

pub fn main(args: &[String]) -> ExitCode {
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        print!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    match Options::parse(args).and_then(|options| test(&options)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask nginx-tests: {error}");
            ExitCode::from(2)
        }
    }
}

struct Options {
    suite: PathBuf,
    binary: PathBuf,
    jobs: usize,
    time_limit: Duration,
    modules: Option<PathBuf>,
    globals: Option<String>,
    expected: PathBuf,
    update: bool,
    json: Option<String>,
    quiet: bool,
    list: bool,
    wanted: Vec<String>,
}

impl Options {
    fn parse(args: &[String]) -> Result<Options, String> {
        let mut suite = None;
        let mut options = Options {
            suite: PathBuf::new(),
            binary: default_binary(),
            jobs: std::thread::available_parallelism().map_or(1, |count| count.get()),
            time_limit: Duration::from_secs(180),
            modules: None,
            globals: None,
            expected: repository().join("tests/nginx/expected.toml"),
            update: false,
            json: None,
            quiet: false,
            list: false,
            wanted: Vec::new(),
        };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().cloned().ok_or_else(|| format!("{arg} needs a value\n\n{USAGE}"));
            match arg.as_str() {
                "--suite" => suite = Some(PathBuf::from(value()?)),
                "--binary" => options.binary = PathBuf::from(value()?),
                "--jobs" => options.jobs = positive(arg, &value()?)? as usize,
                "--time-limit" => options.time_limit = Duration::from_secs(positive(arg, &value()?)?),
                "--modules" => options.modules = Some(PathBuf::from(value()?)),
                "--globals" => options.globals = Some(value()?),
                "--expected" => options.expected = PathBuf::from(value()?),
                "--update" => options.update = true,
                "--json" => options.json = Some(value()?),
                "--quiet" => options.quiet = true,
                "--list" => options.list = true,
                other if other.starts_with('-') => {
                    return Err(format!("there is no option {other}\n\n{USAGE}"));
                }
                word => options.wanted.push(word.to_owned()),
            }
        }
        options.suite = suite.ok_or_else(|| format!("--suite is missing\n\n{USAGE}"))?;
        Ok(options)
    }
}

fn positive(option: &str, text: &str) -> Result<u64, String> {
    text.parse()
        .ok()
        .filter(|number| *number > 0)
        .ok_or_else(|| format!("{option} needs a number above 0, not \"{text}\""))
}

fn test(options: &Options) -> Result<ExitCode, String> {
    let suite = Suite::open(&options.suite)?;
    let files = suite.select(&options.wanted)?;
    if options.list {
        files.iter().for_each(|file| println!("{:<18}{file}", suite::area(file)));
        return Ok(ExitCode::SUCCESS);
    }
    let mut expected = read_expectations(&options.expected)?;
    let scratch = Scratch::new()?;
    let setup = prepare(options, &suite, &scratch)?;
    let binary = version(&setup.binary)?;
    catch_interrupts();

    let results = run_and_compare(options, &setup, &files, &expected);
    let interrupted = INTERRUPTED.load(Ordering::Relaxed);
    let commit = suite.commit();
    if expected.suite.is_some() && expected.suite != commit {
        eprintln!("note: the expectations were recorded with another commit of the suite");
    }
    if options.update && !interrupted {
        let seen: BTreeMap<String, Seen> =
            results.iter().map(|(ran, _)| (ran.file.clone(), ran.seen.clone())).collect();
        expected.update(&seen, options.wanted.is_empty().then_some(&*suite.files));
        expected.suite = commit.clone();
        write(&options.expected, &expected.render())?;
    }
    let report = Report::new(binary, commit, results);
    let unexplained = expected.unexplained();
    publish(options, &setup, &report, &unexplained)?;
    Ok(match (interrupted, report.regressions().next().is_none() && unexplained.is_empty()) {
        (true, _) => ExitCode::from(2),
        // After an update there are no regressions, but missing reasons are still errors.
        (false, holds) if holds || (options.update && unexplained.is_empty()) => ExitCode::SUCCESS,
        (false, _) => ExitCode::FAILURE,
    })
}

/// Runs all files in parallel, then repeats those with unexpected results one by one: some files of the suite measure
/// time and disturb each other on one core.
fn run_and_compare(options: &Options, setup: &Setup, files: &[String], expected: &Expectations) -> Vec<(Ran, Verdict)> {
    let report_progress = |ran: &Ran| {
        if !options.quiet {
            eprintln!("{}", report::progress(ran));
        }
    };
    let mut results: Vec<(Ran, Verdict)> = run::run_all(setup, files, options.jobs, &report_progress)
        .into_iter()
        .map(|ran| {
            let verdict = expected.compare(&ran.file, &ran.seen);
            (ran, verdict)
        })
        .collect();
    if options.jobs == 1 {
        return results;
    }
    for (ran, verdict) in &mut results {
        let surprising = matches!(verdict, Verdict::Regression { .. } | Verdict::News { .. });
        if surprising
            && ran.seen.status == Status::Differs
            && let Some(again) = run::run_all(setup, std::slice::from_ref(&ran.file), 1, &report_progress).pop()
        {
            *verdict = expected.compare(&again.file, &again.seen);
            *ran = Ran { repeated: true, ..again };
        }
    }
    results
}

fn prepare(options: &Options, suite: &Suite, scratch: &Scratch) -> Result<Setup, String> {
    let binary = options.binary.canonicalize().map_err(|error| format!("{}: {error}", options.binary.display()))?;
    let link = scratch.path.join("nginx");
    std::os::unix::fs::symlink(&binary, &link).map_err(|error| format!("{}: {error}", link.display()))?;
    let outputs = repository().join("target/nginx-tests");
    std::fs::create_dir_all(&outputs).map_err(|error| format!("{}: {error}", outputs.display()))?;
    let mut environment = Vec::new();
    if let Some(modules) = &options.modules {
        environment.push(("TEST_NGINX_MODULES", modules.display().to_string()));
    }
    // As root, the default is an unprivileged user for the workers, which cannot enter the temporary folders.
    let for_root = || rustix::process::geteuid().is_root().then(|| "user root;".to_owned());
    let inherited = std::env::var_os("TEST_NGINX_GLOBALS").is_some();
    if let Some(globals) = options.globals.clone().or_else(|| if inherited { None } else { for_root() }) {
        environment.push(("TEST_NGINX_GLOBALS", globals));
    }
    Ok(Setup {
        suite: suite.path.clone(),
        binary: link,
        scratch: scratch.path.clone(),
        outputs,
        time_limit: options.time_limit,
        environment,
    })
}

fn publish(options: &Options, setup: &Setup, report: &Report, unexplained: &[String]) -> Result<(), String> {
    // The table goes to standard output, unless the JSON does.
    if options.json.as_deref() == Some("-") {
        eprint!("{}", report.text());
    } else {
        print!("{}", report.text());
    }
    if !unexplained.is_empty() {
        eprintln!("\n{}: a reason is missing for {}", options.expected.display(), unexplained.join(", "));
    }
    eprintln!("\noutputs: {}", setup.outputs.display());
    let Some(target) = &options.json else {
        return Ok(());
    };
    let json = serde_json::to_string_pretty(report).map_err(|error| error.to_string())?;
    if target == "-" {
        println!("{json}");
        return Ok(());
    }
    write(Path::new(target), &format!("{json}\n"))
}

fn read_expectations(path: &Path) -> Result<Expectations, String> {
    match std::fs::read_to_string(path) {
        Ok(text) => Expectations::parse(&text).map_err(|error| format!("{}: {error}", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Expectations::default()),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// Returns the first line of `-v`. Fails if the binary does not start.
fn version(binary: &Path) -> Result<String, String> {
    let output = Command::new(binary).arg("-v").output().map_err(|error| format!("{}: {error}", binary.display()))?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().next().unwrap_or("(a binary that prints nothing with -v)").to_owned())
}

fn repository() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

fn default_binary() -> PathBuf {
    let release = repository().join("target/release/gale");
    if release.exists() { release } else { repository().join("target/debug/gale") }
}

/// A temporary folder, removed after the run.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn new() -> Result<Scratch, String> {
        let path = std::env::temp_dir().join(format!("gnt-{}", std::process::id()));
        std::fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Scratch { path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Sets a flag on SIGINT and SIGTERM. Ctrl-C does not reach the process groups of the files, so the threads that wait
/// for them check the flag.
fn catch_interrupts() {
    extern "C" fn remember(_signal: libc::c_int) {
        INTERRUPTED.store(true, Ordering::Relaxed);
    }
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores into an atomic, which is async-signal-safe, and lives as long as the process.
        unsafe { libc::signal(signal, remember as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Options, String> {
        Options::parse(&words.iter().map(|word| word.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn options_and_words_may_mix() {
        let options = parse(&["rewrite", "--suite", "s", "--jobs", "3", "http core", "--update"]).unwrap();
        assert_eq!(options.wanted, ["rewrite", "http core"]);
        assert_eq!((options.jobs, options.update), (3, true));
    }

    #[test]
    fn wrong_options_are_refused() {
        for words in [&["--suite"][..], &["--suite", "s", "--fast"], &["--suite", "s", "--jobs", "0"], &["rewrite"]] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }
}
