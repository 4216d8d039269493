//! campaign: attacks and faults that an administrator meets, each an experiment with a verdict.
//!
//! An experiment says in one sentence what is done to a server and in another what must hold: no request is lost but
//! those that the fault itself ends, no byte is wrong, no descriptor is left open, memory comes back. It measures no
//! speed. Each runs for one server at a time in a process of its own with its own mounts and process numbers
//! ([`isolation`]), so that nothing outlives it, also when it fails or takes too long. An experiment that the machine
//! cannot run is told as "not run" and is no failure. Invariant: the exit status is that of Gale's rows; nginx's are
//! there to compare.

mod cache_trust;
mod clocks;
mod deaths;
mod descriptors;
mod disk_full;
mod dns;
mod every_byte;
mod exchange;
mod faulty_disk;
mod http2;
mod isolation;
mod memory_limit;
mod origin;
mod outcome;
mod paths;
mod power_cut;
mod ranges;
mod reloads;
mod slow_clients;
mod soak;
mod table;
mod tls;
mod trial;

use std::time::Duration;

use isolation::Need;
use outcome::{Outcome, Row, Verdict};
use trial::Trial;

use crate::options::Options;
use crate::servers::{Kind, Program};

const USAGE: &str = "\
usage: cargo xtask campaign [NAME…] [OPTION…]

Runs experiments (all, or those named) on Gale with each driver and on nginx, and tells them in a table.

  --list                 list the experiments: actions and requirements of each
  --gale PATH | --nginx PATH
                         the binaries (default: target/release/gale; nginx from PATH)
  --gale-use A,B         drivers (default: epoll,io_uring)
  --servers A,B          only those labels: gale, nginx, \"gale epoll\", …
  --hours N              length of the soak (default: a minute)
  --reloads N            of the experiment `reloads` (default: 400)
  --upgrades N           of the experiment `upgrades` (default: 100)
  --slow-clients N       of the experiment `slow-clients` (default: 10000)
  --results DIR          where the table is (default: bench/results). Rows of experiments that did not run stay.

The status is 0 when all of Gale's promises hold, 1 when one does not, 2 when nothing could be run. The whole takes
about half an hour. Root is needed for most of it: mounts, control groups, strace.
";

/// The longest that an experiment may take for one server, beside the soak.
const TIME_LIMIT: Duration = Duration::from_secs(180);

/// One kind of attack or fault.
struct Experiment {
    name: &'static str,
    /// The attack or fault, in a sentence.
    does: &'static str,
    /// The promise, in a sentence.
    holds: &'static str,
    needs: &'static [Need],
    /// The reason why it does not run on nginx.
    not_on_nginx: Option<&'static str>,
    run: fn(&Trial) -> Result<Outcome, String>,
}

/// The faults first that an administrator meets first.
const EXPERIMENTS: &[Experiment] = &[
    disk_full::EXPERIMENT,
    descriptors::EXPERIMENT,
    deaths::EXPERIMENT,
    reloads::RELOADS,
    reloads::BAD_RELOADS,
    reloads::UPGRADES,
    every_byte::HOSTILE_SERVER,
    every_byte::LEAVING_CLIENT,
    slow_clients::EXPERIMENT,
    memory_limit::EXPERIMENT,
    faulty_disk::FAILING_CALLS,
    faulty_disk::SLOW_DISK,
    dns::EXPERIMENT,
    http2::EXPERIMENT,
    cache_trust::EXPERIMENT,
    ranges::EXPERIMENT,
    paths::EXPERIMENT,
    tls::EXPERIMENT,
    power_cut::EXPERIMENT,
    clocks::EXPERIMENT,
    soak::EXPERIMENT,
];

/// `campaign [NAME…] [OPTION…]`: whether all that Gale promises holds.
pub fn main(args: &[String]) -> Result<bool, String> {
    if args.iter().any(|arg| arg == "--help") {
        print!("{USAGE}");
        return Ok(true);
    }
    if args.iter().any(|arg| arg == "--list") {
        print!("{}", list());
        return Ok(true);
    }
    let (names, rest) = split(args);
    let experiments = choose(&names)?;
    let options = options(&rest)?;
    let programs = options.servers(Some(&["nginx", "gale"]))?;
    let mut rows = Vec::new();
    for experiment in experiments {
        for program in &programs {
            let row = run_one(experiment, program, &options, &rest);
            if isolation::is_interrupted() {
                return Err("interrupted".to_owned());
            }
            eprintln!("{row}");
            rows.push(row);
        }
        // At once, so that a run that is interrupted keeps them.
        table::document(&rows, &programs, &options.results)?.save(&options.results)?;
    }
    table::document(&rows, &programs, &options.results)?.publish(&options.results)?;
    Ok(rows.iter().all(|row| !row.is_failure_of_gale()))
}

/// `campaign-trial NAME LABEL [OPTION…]`: one experiment for one server, in this process; its outcome goes to
/// standard output.
pub fn trial(args: &[String]) -> Result<bool, String> {
    let [name, label, rest @ ..] = args else { return Err("usage: campaign-trial NAME LABEL [OPTION…]".to_owned()) };
    let experiment = choose(std::slice::from_ref(name))?[0];
    let options = options(rest)?;
    let programs = options.servers(Some(&["nginx", "gale"]))?;
    let program = programs.iter().find(|program| program.label == *label).ok_or("there is no such server")?;
    let outcome = (experiment.run)(&Trial { program, options: &options })?;
    println!("{}", serde_json::to_string(&outcome).map_err(|error| error.to_string())?);
    Ok(true)
}

fn run_one(experiment: &Experiment, program: &Program, options: &Options, rest: &[String]) -> Row {
    let not_run = |reason: String| Row::new(experiment.name, program, Verdict::NotRun(reason));
    if let Some(reason) = experiment.not_on_nginx.filter(|_| program.kind == Kind::Nginx) {
        return not_run(reason.to_owned());
    }
    if let Some(lacks) = experiment.needs.iter().find_map(|need| need.lacking()) {
        return not_run(lacks);
    }
    let soaks = options.soak_hours.filter(|_| experiment.name == soak::EXPERIMENT.name);
    let limit = TIME_LIMIT + Duration::from_secs(3600) * soaks.unwrap_or(0);
    let mut words = vec!["campaign-trial".to_owned(), experiment.name.to_owned(), program.label.clone()];
    words.extend(rest.iter().cloned());
    match isolation::run(&words, limit) {
        Ok(outcome) => Row::of(experiment.name, program, outcome),
        Err(error) => Row::new(experiment.name, program, Verdict::Fails(vec![error])),
    }
}

fn list() -> String {
    let entry = |experiment: &Experiment| {
        format!("{}\n    {}\n    Must hold: {}\n", experiment.name, experiment.does, experiment.holds)
    };
    EXPERIMENTS.iter().map(entry).collect()
}

/// Names of experiments, and options with their values.
fn split(args: &[String]) -> (Vec<String>, Vec<String>) {
    let (mut names, mut options) = (Vec::new(), Vec::new());
    let mut args = args.iter().cloned();
    while let Some(arg) = args.next() {
        if arg.starts_with("--") {
            options.push(arg);
            options.extend(args.next());
        } else {
            names.push(arg);
        }
    }
    (names, options)
}

fn choose(names: &[String]) -> Result<Vec<&'static Experiment>, String> {
    let known = |name: &String| EXPERIMENTS.iter().any(|experiment| experiment.name == name);
    if let Some(unknown) = names.iter().find(|name| !known(name)) {
        return Err(format!("there is no experiment \"{unknown}\"; `--list` names them"));
    }
    let is_chosen = |experiment: &&Experiment| names.is_empty() || names.iter().any(|name| name == experiment.name);
    Ok(EXPERIMENTS.iter().filter(is_chosen).collect())
}

/// Those of the measurements, with numbers that are shorter where they are not given.
fn options(args: &[String]) -> Result<Options, String> {
    const RELOADS: u32 = 400;
    const SLOW_CLIENTS: usize = 10_000;
    let mut options = Options::parse(args)?;
    if !args.iter().any(|arg| arg == "--reloads") {
        options.reloads = RELOADS;
    }
    if !args.iter().any(|arg| arg == "--slow-clients") {
        options.experiment.slow_clients = SLOW_CLIENTS;
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn names_and_options_are_told_apart_in_any_order() {
        let (names, options) = split(&words("ranges --hours 2 dns --gale /g"));
        assert_eq!((names, options), (words("ranges dns"), words("--hours 2 --gale /g")));
    }

    #[test]
    fn unknown_experiment_is_refused() {
        assert!(choose(&words("ranges nothing")).is_err());
        assert_eq!(choose(&words("dns ranges")).unwrap().len(), 2);
        assert_eq!(choose(&[]).unwrap().len(), EXPERIMENTS.len());
    }

    #[test]
    fn experiments_have_unique_names_and_descriptions() {
        for (number, experiment) in EXPERIMENTS.iter().enumerate() {
            assert!(EXPERIMENTS[..number].iter().all(|other| other.name != experiment.name));
            assert!(experiment.does.ends_with('.') && experiment.holds.ends_with('.'), "{}", experiment.name);
        }
    }

    #[test]
    fn reloads_are_fewer_unless_their_number_is_given() {
        assert_eq!(options(&[]).unwrap().reloads, 400);
        assert_eq!(options(&words("--reloads 1000")).unwrap().reloads, 1000);
    }
}
