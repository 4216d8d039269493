//! rare-files: files that are always in memory but rarely requested, beside client 1.
//!
//! There are classes of small and large files, each file requested at an interval of 0.1 to 30 s, all classes together;
//! first alone, then beside the clients of the slow disk. A file in memory must not wait for the disk, however long ago
//! it was last requested. The harness locks the files in memory, so that the figures reflect the server and not the
//! kernel's eviction. Before and after each run it checks that they are there: a run is invalid for a class with a
//! missing page.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::data_set::{self, DataSet, FILE_BYTES, Mapping, Random};
use super::rounds::{Results, Row, Runs, Target, percent_at_least};
use super::waits::{self, Waits};
use super::{CLIENT_1_CONNECTIONS, Clients, Experiment, Site, Subject, WARM_UP, WORKER_USER, get, stalls, with_aio};
use crate::Measured;
use crate::client::load::{Answer, Connection, Failure};
use crate::client::swarm::{self, Got};
use crate::client::timetable::{Punctuality, Series, SeriesGot, Timetable};
use crate::options::Options;
use crate::report::{self, Document, Spread};
use crate::servers::{Program, Running};

/// Files of one size, each requested at one interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Class {
    bytes: u64,
    interval_ms: u64,
    files: u32,
}

const SMALL: u64 = 300_000;
const LARGE: u64 = FILE_BYTES;

/// A hundred files for long intervals, fewer for short ones: all large files together take at most 450 MB/s, and in 90
/// s each class has 300 samples.
const CLASSES: [Class; 10] = [
    Class { bytes: SMALL, interval_ms: 100, files: 10 },
    Class { bytes: SMALL, interval_ms: 1_000, files: 100 },
    Class { bytes: SMALL, interval_ms: 3_000, files: 100 },
    Class { bytes: SMALL, interval_ms: 10_000, files: 100 },
    Class { bytes: SMALL, interval_ms: 30_000, files: 100 },
    Class { bytes: LARGE, interval_ms: 100, files: 4 },
    Class { bytes: LARGE, interval_ms: 1_000, files: 20 },
    Class { bytes: LARGE, interval_ms: 3_000, files: 100 },
    Class { bytes: LARGE, interval_ms: 10_000, files: 100 },
    Class { bytes: LARGE, interval_ms: 30_000, files: 100 },
];

/// Targets: maximum growth of the 99th percentile beside client 1.
const SMALL_P99_GROWTH_MAX_MS: f64 = 5.0;
const LARGE_P99_GROWTH_MAX_MS: f64 = 30.0;

impl Class {
    /// Returns the interval between requests of the class, whose files are distributed evenly.
    fn step(&self) -> Duration {
        Duration::from_millis(self.interval_ms) / self.files
    }

    fn p99_growth_max_ms(&self) -> f64 {
        if self.bytes == SMALL { SMALL_P99_GROWTH_MAX_MS } else { LARGE_P99_GROWTH_MAX_MS }
    }

    fn size(&self) -> &'static str {
        if self.bytes == SMALL { "300 KB" } else { "4 MiB" }
    }

    fn interval(&self) -> String {
        format!("{} s", self.interval_ms as f64 / 1e3)
    }
}

/// Offset between the starts of classes. The steps are multiples of 5 ms, so no two classes ever have a request at the
/// same moment.
const BEGIN_APART: Duration = Duration::from_micros(3_500);

fn timetable() -> Vec<Series> {
    let series = |(number, class): (usize, &Class)| Series {
        requests: (0..class.files).map(|file| get(&path_of(number, file))).collect(),
        first: BEGIN_APART * number as u32,
        step: class.step(),
    };
    CLASSES.iter().enumerate().map(series).collect()
}

fn path_of(class: usize, file: u32) -> String {
    format!("/files/rare/{class}/{file}")
}

struct RareFiles {
    directory: PathBuf,
}

impl RareFiles {
    fn bytes() -> u64 {
        CLASSES.iter().map(|class| class.bytes * u64::from(class.files)).sum()
    }

    /// Writes `directory/rare/CLASS/N`, readable for all users.
    fn write(directory: &Path) -> Result<RareFiles, String> {
        let files = RareFiles { directory: directory.join("rare") };
        let mut random = Random(0x6a09_e667_f3bc_c909);
        let mut write = || -> std::io::Result<()> {
            for (number, class) in CLASSES.iter().enumerate() {
                fs::create_dir_all(files.directory.join(number.to_string()))?;
                let mut contents = vec![0; class.bytes as usize];
                for path in files.of_class(number) {
                    random.fill(&mut contents);
                    data_set::write_cold(&path, &contents)?;
                    fs::set_permissions(&path, fs::Permissions::from_mode(0o644))?;
                }
            }
            Ok(())
        };
        write().map_err(|error| format!("{}: {error}", files.directory.display()))?;
        Ok(files)
    }

    fn of_class(&self, class: usize) -> impl Iterator<Item = PathBuf> {
        let directory = self.directory.join(class.to_string());
        (0..CLASSES[class].files).map(move |file| directory.join(file.to_string()))
    }

    fn forget(&self) -> Result<(), String> {
        (0..CLASSES.len()).flat_map(|class| self.of_class(class)).try_for_each(|path| data_set::forget(&path))
    }

    /// Lets the server read each file once, so that its control group is charged for them, and locks them in memory
    /// until the result is dropped. Otherwise the kernel would evict those requested every 30 s in favour of client
    /// 1's.
    fn load(&self, server: &Running) -> Result<Vec<Mapping>, String> {
        let fault = |path: &str, failure: Failure| format!("{}: {path}: {failure:?}", server.label);
        let mut connection = Connection::open(&server.address).map_err(|failure| fault("connection", failure))?;
        for (number, class) in CLASSES.iter().enumerate() {
            for file in 0..class.files {
                let path = path_of(number, file);
                let answer = connection.request(&path, false).map_err(|failure| fault(&path, failure))?;
                let Answer { status, body, .. } = answer;
                if status != 200 || body.len() as u64 != class.bytes {
                    return Err(format!("{}: {path}: status {status}, {} bytes", server.label, body.len()));
                }
            }
        }
        let held = data_set::hold_in_memory((0..CLASSES.len()).flat_map(|class| self.of_class(class)));
        Ok(held.unwrap_or_else(|error| {
            eprintln!("note: the kernel may evict files ({error}); the report tells which share was in memory");
            Vec::new()
        }))
    }

    /// Returns the share of pages in memory, by class.
    fn in_memory(&self) -> Result<Vec<f64>, String> {
        (0..CLASSES.len()).map(|class| data_set::share_in_memory(self.of_class(class))).collect()
    }
}

#[derive(Debug, Serialize)]
struct Sample {
    #[serde(flatten)]
    class: Class,
    #[serde(flatten)]
    figures: SeriesGot,
    in_memory_before: f64,
    in_memory_after: f64,
}

#[derive(Debug, Serialize)]
struct Run {
    /// In the order of [`CLASSES`].
    samples: Vec<Sample>,
    /// Figures of the client that requests them.
    client: Punctuality,
    client_1: Option<Got>,
    probe: Got,
    waits: BTreeMap<String, Waits>,
}

pub fn measure(options: &Options) -> Measured {
    let experiment = experiment(&options.experiment);
    let programs = with_aio(options.servers(Some(&["nginx", "gale"]))?)?;
    let site = Site::build(&experiment, (experiment.data_mib << 20) + RareFiles::bytes())?;
    eprintln!("writing {} MiB", experiment.data_mib + (RareFiles::bytes() >> 20));
    let files = RareFiles::write(site.root())?;
    let data = DataSet::write(site.root(), experiment.data_mib << 20)?;
    let mut rows: Vec<Row<Run>> = Vec::new();
    for round in 1..=options.rounds {
        for subject in Subject::by_default(&programs) {
            data.forget();
            files.forget()?;
            let server = subject.start(&site, experiment.workers)?;
            let held = files.load(&server)?;
            let logged = server.error_log().len();
            let without = run(options, &server, &files, None)?;
            let with = run(options, &server, &files, Some(&data))?;
            eprintln!("  round {round}, {}: p99 {}", server.label, p99_of_classes(&with));
            let stalls = stalls(&server.error_log()[logged..]);
            Row::add(&mut rows, &server.label, without, with, stalls);
            drop(held);
        }
    }
    let holds =
        rows.iter().flat_map(Row::runs).flat_map(|run| &run.samples).all(|sample| sample.figures.got.errors == 0);
    Ok((document(options, &experiment, &site, &programs, &rows)?, holds))
}

/// Memory is sufficient: as much for client 1 as in `thread-pools`, plus enough for all files.
fn experiment(chosen: &Experiment) -> Experiment {
    let memory_mib = (chosen.memory_bytes() >> 20) + (RareFiles::bytes() >> 20) * 9 / 8;
    let memory_mib = chosen.memory_mib.or(Some(memory_mib));
    Experiment { on_small_disk: true, memory_mib, ..chosen.clone() }
}

/// Runs all classes, beside client 1 if its data is given.
fn run(options: &Options, server: &Running, files: &RareFiles, client_1: Option<&DataSet>) -> Result<Run, String> {
    let before = files.in_memory()?;
    // Connected before client 1.
    let timetable = Timetable::connect(&server.address, timetable())?;
    let ends = AtomicBool::new(false);
    let clients = Clients::of(server);
    // The timetable ends the run.
    let client_1_time = options.rare_time + Duration::from_secs(60);
    std::thread::scope(|scope| {
        let client_1 = client_1.map(|data| scope.spawn(|| clients.client_1(data, client_1_time, &ends)));
        let probe = scope.spawn(|| swarm::probe(&server.address, "/return", WARM_UP, &ends));
        let waits = scope.spawn(|| waits::watch(server.root, &ends));
        // In a separate thread, because it takes real-time priority.
        let outcome = scope.spawn(|| timetable.run(WARM_UP, options.rare_time)).join();
        ends.store(true, Ordering::Relaxed);
        let ended = "a client does not panic";
        let outcome = outcome.expect(ended)?;
        let after = files.in_memory()?;
        let sample = |(number, figures): (usize, SeriesGot)| Sample {
            class: CLASSES[number],
            figures,
            in_memory_before: before[number],
            in_memory_after: after[number],
        };
        Ok(Run {
            samples: outcome.series.into_iter().enumerate().map(sample).collect(),
            client: outcome.client,
            client_1: client_1.map(|client| client.join().expect(ended)).transpose()?,
            probe: probe.join().expect(ended)?,
            waits: waits.join().expect(ended),
        })
    })
}

fn p99_of_classes(run: &Run) -> String {
    let p99 = |sample: &Sample| format!("{:.1}", sample.figures.got.p99_ms);
    format!("{} ms", run.samples.iter().map(p99).collect::<Vec<_>>().join(", "))
}

struct ClassRow<'a> {
    row: &'a Row<Run>,
    class: usize,
}

impl ClassRow<'_> {
    fn class(&self) -> &'static Class {
        &CLASSES[self.class]
    }

    fn with(&self, figure: impl Fn(&Sample) -> f64) -> Spread {
        self.row.with(|run| figure(&run.samples[self.class]))
    }

    fn without(&self, figure: impl Fn(&Sample) -> f64) -> Spread {
        self.row.without(|run| figure(&run.samples[self.class]))
    }

    /// Returns the minimum of all runs.
    fn samples(&self) -> u64 {
        self.row.runs().map(|run| run.samples[self.class].figures.requests).min().unwrap_or(0)
    }

    /// Returns the minimum share before or after a run.
    fn in_memory(&self) -> f64 {
        let share = |run: &Run| {
            let Sample { in_memory_before, in_memory_after, .. } = run.samples[self.class];
            in_memory_before.min(in_memory_after)
        };
        self.row.runs().map(share).fold(1.0, f64::min)
    }

    fn errors(&self) -> u64 {
        self.row.runs().map(|run| run.samples[self.class].figures.got.errors).sum()
    }

    /// Compares each run beside client 1 with the median of the runs without it.
    fn target(&self) -> Runs {
        let alone = self.without(p99).median;
        Runs::of(self.row.with_client_1.iter().map(|run| run.samples[self.class].meets(alone)))
    }
}

fn p99(sample: &Sample) -> f64 {
    sample.figures.got.p99_ms
}

impl Sample {
    /// Returns true if the 99th percentile is within its limit, given that without client 1; `None` if a page was
    /// missing.
    fn meets(&self, p99_alone_ms: f64) -> Option<bool> {
        let SeriesGot { got, requests, unfinished } = self.figures;
        let was_in_memory = self.in_memory_before == 1.0 && self.in_memory_after == 1.0;
        let is_near = got.p99_ms <= p99_alone_ms + self.class.p99_growth_max_ms();
        (was_in_memory && requests > 0).then_some(is_near && unfinished == 0 && got.errors == 0)
    }
}

fn document(
    options: &Options,
    experiment: &Experiment,
    site: &Site,
    programs: &[Program],
    rows: &[Row<Run>],
) -> Result<Document, String> {
    let is_whole = site.cage.limits_memory && site.cage.limits_disk;
    let of_classes = |row| (0..CLASSES.len()).map(move |class| ClassRow { row, class });
    let class_rows: Vec<ClassRow> = rows.iter().flat_map(of_classes).collect();
    let pair = |row: &ClassRow, figure: fn(&Sample) -> f64| {
        format!("{:.1} / {:.1}", row.with(figure).median, row.without(figure).median)
    };
    let table = report::table_of(
        &class_rows,
        &[
            ("server", &|row: &ClassRow| row.row.server.clone()),
            ("file", &|row| row.class().size().to_owned()),
            ("asked for every", &|row| row.class().interval()),
            ("samples", &|row| row.samples().to_string()),
            ("in memory", &|row| percent_at_least(row.in_memory())),
            ("p50 ms", &|row| pair(row, |sample| sample.figures.got.p50_ms)),
            ("p99 ms", &|row| pair(row, p99)),
            ("max ms", &|row| {
                let max = |sample: &Sample| sample.figures.got.max_ms;
                format!("{:.1} / {:.1}", row.with(max).greatest, row.without(max).greatest)
            }),
            ("p99 within", &|row| {
                let runs = if is_whole { row.target() } else { Runs::default() };
                format!("+ {:.0} ms: {}", row.class().p99_growth_max_ms(), runs.text())
            }),
            ("errors", &|row| row.errors().to_string()),
        ],
    );
    let servers = report::table_of(
        rows,
        &[
            ("server", &|row: &Row<Run>| row.server.clone()),
            ("client 1 MiB/s", &|row| {
                let bytes = |run: &Run| run.client_1.map_or(0.0, |got| got.bytes_per_second);
                format!("{:.0}", row.with(bytes).median / f64::from(1 << 20))
            }),
            ("probe p99 ms", &|row| {
                let p99 = |run: &Run| run.probe.p99_ms;
                format!("{:.1} / {:.1}", row.with(p99).median, row.without(p99).median)
            }),
            ("stalls logged", &|row| row.stalls.len().to_string()),
            ("loops waited over 20 ms for", &|row| {
                waits::text(&waits::together(row.with_client_1.iter().map(|run| &run.waits)))
            }),
            ("asked late p99 ms", &|row| format!("{:.2}", row.with(|run| run.client.late_p99_ms).greatest)),
            ("asked late max ms", &|row| format!("{:.2}", row.with(|run| run.client.late_max_ms).greatest)),
            ("client's core", &|row| report::percent(row.with(|run| run.client.share_of_core).greatest)),
        ],
    );
    let target = |row: &ClassRow| Target {
        server: row.row.server.clone(),
        target: format!(
            "{} every {}: p99 ≤ + {:.0} ms",
            row.class().size(),
            row.class().interval(),
            row.class().p99_growth_max_ms()
        ),
        runs: row.target(),
    };
    let targets: Vec<Target> = if is_whole { class_rows.iter().map(target).collect() } else { Vec::new() };
    let unjudged = "The targets say something only with a slow disk and a limit on memory: not judged.\n\n";
    let body = format!(
        "{}{}Files in memory, beside {CLIENT_1_CONNECTIONS} connections that request random files from {} MiB of files \
         of 4 MiB (client 1); {}, {}, {} workers as {WORKER_USER}, files owned by root, the default of `aio` unless \
         named. All classes of files at once, {} files and {} MiB together, each file at its interval, spread evenly, \
         for {} s. {} rounds: medians, and the greatest maximum. Of two figures in a cell, the first is with client 1, \
         the second without it.\n\n{table}\n{servers}\n{NOTES}",
        site.notes(),
        if is_whole { "" } else { unjudged },
        experiment.data_mib,
        site.memory(experiment),
        site.disk(experiment),
        experiment.workers,
        CLASSES.iter().map(|class| class.files).sum::<u32>(),
        RareFiles::bytes() >> 20,
        options.rare_time.as_secs(),
        options.rounds,
    );
    let title = "Files in memory that are seldom asked for, beside a slow disk";
    Document::new("rare-files", title, programs, &body, Results { rows, targets: &targets })
}

const NOTES: &str = "\
The time of an answer counts from the moment at which its request was due, also if the request had to wait for the \
answer to the one before for the same file. A request without an answer 10 s after the last one was due counts with \
the time that it had waited. The files are locked \
in memory (mlock) by the client. In memory: the least share of the pages of a class before or after a run (mincore); a \
run says nothing about a class of which a page was missing. Each run with client 1 is compared with the median of the \
runs without it; an error or a missing answer misses the target, too. Asked late: from the moment at which a request \
was due, on a connection that was free, until it was sent. Client's core: CPU time of the one thread that asks. Both \
are the greatest of the runs; where both are small, the client was not the limit. Stalls and waits are those of event \
loops, over 20 ms.\n";

#[cfg(test)]
mod tests {
    use super::*;

    /// With these two, a run is long enough for every class.
    const RUN_TIME: Duration = Duration::from_secs(90);
    const SAMPLES_MIN: u128 = 300;
    /// With more, copying by the network would be the limit.
    const LARGE_BYTES_PER_SECOND_MAX: f64 = 450e6;

    #[test]
    fn every_class_has_its_samples_within_a_run() {
        for class in CLASSES {
            assert!(RUN_TIME.as_nanos() / class.step().as_nanos() >= SAMPLES_MIN, "{class:?}");
        }
    }

    #[test]
    fn large_files_stay_below_their_bandwidth() {
        let large = CLASSES.iter().filter(|class| class.bytes == LARGE);
        let sum: f64 = large.map(|class| class.bytes as f64 / class.step().as_secs_f64()).sum();
        assert!(sum <= LARGE_BYTES_PER_SECOND_MAX, "{sum}");
    }

    #[test]
    fn a_file_is_asked_for_at_its_interval() {
        for (class, series) in CLASSES.iter().zip(timetable()) {
            let interval = series.due(class.files) - series.due(0);
            assert_eq!(interval, Duration::from_millis(class.interval_ms));
            assert_eq!(series.requests.len(), class.files as usize);
        }
    }

    #[test]
    fn no_two_requests_are_due_at_the_same_moment() {
        let due = |series: &Series| (0..1000).map(|number| series.due(number)).collect::<Vec<_>>();
        let mut all: Vec<Duration> = timetable().iter().flat_map(due).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 1000 * CLASSES.len());
    }

    fn sample(class: Class, p99_ms: f64, in_memory_after: f64) -> Sample {
        let got = Got { p99_ms, ..Got::default() };
        let figures = SeriesGot { got, requests: 300, unfinished: 0 };
        Sample { class, figures, in_memory_before: 1.0, in_memory_after }
    }

    #[test]
    fn small_and_large_files_have_targets_of_their_own() {
        let [small, large] = [SMALL, LARGE].map(|bytes| Class { bytes, interval_ms: 100, files: 1 });
        assert_eq!(sample(small, 6.9, 1.0).meets(2.0), Some(true));
        assert_eq!(sample(small, 7.1, 1.0).meets(2.0), Some(false));
        assert_eq!(sample(large, 31.9, 1.0).meets(2.0), Some(true));
        assert_eq!(sample(large, 32.1, 1.0).meets(2.0), Some(false));
    }

    #[test]
    fn a_run_without_answers_or_with_missing_pages_does_not_meet_a_target() {
        let class = CLASSES[0];
        assert_eq!(sample(class, 1.0, 0.999).meets(2.0), None);
        let mut broken = sample(class, 1.0, 1.0);
        broken.figures.got.errors = 1;
        assert_eq!(broken.meets(2.0), Some(false));
        broken.figures = SeriesGot { got: Got::default(), requests: 0, unfinished: 0 };
        assert_eq!(broken.meets(2.0), None);
    }
}
