//! Formats a run as a table of areas, as lists of changes, and as JSON.
//!
//! All verdicts come from `expected.rs`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::expected::{Status, Verdict};
use super::run::{Ending, Ran};
use super::suite;

#[derive(Debug, Serialize)]
pub struct Report {
    /// The first line of the binary's `-v`.
    pub binary: String,
    /// The suite's commit, if git reports it.
    pub suite: Option<String>,
    pub areas: BTreeMap<String, Count>,
    pub total: Count,
    pub files: Vec<FileReport>,
}

#[derive(Debug, Default, Clone, Copy, Serialize, PartialEq, Eq)]
pub struct Count {
    pub files: u32,
    pub pass: u32,
    pub differs: u32,
    pub skip: u32,
    pub regressions: u32,
    /// Test points of files that were not skipped.
    pub points: u32,
    pub points_passed: u32,
    /// Test points counted as passed that failed but are marked TODO.
    pub points_todo: u32,
}

#[derive(Debug, Serialize)]
pub struct FileReport {
    pub file: String,
    pub area: String,
    pub status: Status,
    #[serde(flatten)]
    pub verdict: Verdict,
    pub points: u32,
    pub points_passed: u32,
    pub points_todo: u32,
    pub failing: Vec<u32>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub skip_reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub startup_error: Option<String>,
    pub ending: Ending,
    pub seconds: f64,
    pub repeated: bool,
    #[serde(skip)]
    failed_points: Vec<(u32, String)>,
}

impl Report {
    pub fn new(binary: String, suite: Option<String>, results: Vec<(Ran, Verdict)>) -> Report {
        let files: Vec<FileReport> = results.into_iter().map(|(ran, verdict)| FileReport::new(ran, verdict)).collect();
        let mut areas: BTreeMap<String, Count> = BTreeMap::new();
        let mut total = Count::default();
        for file in &files {
            areas.entry(file.area.clone()).or_default().add(file);
            total.add(file);
        }
        Report { binary, suite, areas, total, files }
    }

    pub fn regressions(&self) -> impl Iterator<Item = &FileReport> {
        self.files.iter().filter(|file| matches!(file.verdict, Verdict::Regression { .. }))
    }

    /// Returns the table and the lists, for a terminal.
    pub fn text(&self) -> String {
        let mut text = format!("{}\n\n", self.binary);
        let _ = writeln!(
            text,
            "{:<18}{:>7}{:>8}{:>9}{:>9}{:>13}{:>9}{:>9}{:>7}",
            "area", "files", "passed", "differ", "skipped", "regressions", "points", "passed", "todo"
        );
        for (area, count) in &self.areas {
            count.write_row(&mut text, area);
        }
        self.total.write_row(&mut text, "total");
        self.write_regressions(&mut text);
        self.write_news(&mut text);
        self.write_skips(&mut text);
        text
    }

    fn write_regressions(&self, text: &mut String) {
        if self.regressions().next().is_some() {
            text.push_str("\nRegressions:\n");
        }
        for file in self.regressions() {
            let _ = writeln!(text, "  {}: {}", file.file, file.summary());
            // The first names identify the fault; the whole output is in the outputs folder.
            const NAMES_MAX: usize = 10;
            for (number, name) in file.failed_points.iter().take(NAMES_MAX) {
                let _ = writeln!(text, "    not ok {number} - {name}");
            }
            if file.failed_points.len() > NAMES_MAX {
                let _ = writeln!(text, "    and {} more", file.failed_points.len() - NAMES_MAX);
            }
        }
    }

    fn write_news(&self, text: &mut String) {
        let news = self.files.iter().filter_map(|file| match &file.verdict {
            Verdict::News { what } => Some(format!("  {}: {what}; now {}\n", file.file, file.summary())),
            _ => None,
        });
        let news: Vec<String> = news.collect();
        if !news.is_empty() {
            let _ = write!(text, "\nNews (`--update` records it):\n{}", news.concat());
        }
        let repeated: Vec<&str> = self.files.iter().filter(|file| file.repeated).map(|file| &*file.file).collect();
        if !repeated.is_empty() {
            let _ = writeln!(text, "\nRun a second time, alone: {}", repeated.join(", "));
        }
    }

    /// Writes the suite's reasons for skipping files: features that the binary or the machine lacks.
    fn write_skips(&self, text: &mut String) {
        let mut reasons: BTreeMap<&str, u32> = BTreeMap::new();
        for file in self.files.iter().filter(|file| file.status == Status::Skip) {
            *reasons.entry(&file.skip_reason).or_default() += 1;
        }
        let mut reasons: Vec<(&str, u32)> = reasons.into_iter().collect();
        reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        if !reasons.is_empty() {
            text.push_str("\nSkipped by the suite:\n");
        }
        for (reason, count) in reasons {
            let _ = writeln!(text, "  {count:>4} {reason}");
        }
    }
}

impl Count {
    fn add(&mut self, file: &FileReport) {
        self.files += 1;
        match file.status {
            Status::Pass => self.pass += 1,
            Status::Differs => self.differs += 1,
            Status::Skip => self.skip += 1,
        }
        self.regressions += u32::from(matches!(file.verdict, Verdict::Regression { .. }));
        self.points += file.points;
        self.points_passed += file.points_passed;
        self.points_todo += file.points_todo;
    }

    fn write_row(&self, text: &mut String, name: &str) {
        let _ = writeln!(
            text,
            "{name:<18}{:>7}{:>8}{:>9}{:>9}{:>13}{:>9}{:>9}{:>7}",
            self.files,
            self.pass,
            self.differs,
            self.skip,
            self.regressions,
            self.points,
            self.points_passed,
            self.points_todo
        );
    }
}

impl FileReport {
    fn new(ran: Ran, verdict: Verdict) -> FileReport {
        FileReport {
            area: suite::area(&ran.file).to_owned(),
            file: ran.file,
            status: ran.seen.status,
            verdict,
            points: ran.total,
            points_passed: ran.passed,
            points_todo: ran.todo,
            failing: ran.seen.failing,
            skip_reason: ran.seen.skip_reason,
            startup_error: ran.startup_error,
            ending: ran.ending,
            seconds: ran.duration.as_secs_f64(),
            repeated: ran.repeated,
            failed_points: ran.failed_points,
        }
    }

    fn summary(&self) -> String {
        let ending = match &self.startup_error {
            Some(error) => format!(", did not start: {error}"),
            None => ending_words(&self.ending),
        };
        summary(self.status, &self.skip_reason, self.points_passed, self.points, &ending)
    }
}

/// Returns a line about a file that has ended.
pub fn progress(ran: &Ran) -> String {
    let ending = ending_words(&ran.ending);
    let summary = summary(ran.seen.status, &ran.seen.skip_reason, ran.passed, ran.total, &ending);
    format!("{:<44} {summary}, {:.1} s", ran.file, ran.duration.as_secs_f64())
}

fn summary(status: Status, skip_reason: &str, passed: u32, total: u32, ending: &str) -> String {
    match status {
        Status::Pass => format!("pass, {passed} of {total}"),
        Status::Skip => format!("skip: {skip_reason}"),
        Status::Differs => format!("differs, {passed} of {total}{ending}"),
    }
}

/// Describes the end of a process. The exit status of Test::More is the number of failed points, which is known
/// already.
fn ending_words(ending: &Ending) -> String {
    match ending {
        Ending::Exited(code @ (0..=254)) => match code {
            0 => String::new(),
            code => format!(", exit status {code}"),
        },
        Ending::Exited(code) => format!(", died (exit status {code})"),
        Ending::Signalled(signal) => format!(", killed by signal {signal}"),
        Ending::TimedOut => ", time limit".to_owned(),
        Ending::Interrupted => ", interrupted".to_owned(),
        Ending::Failed(error) => format!(", not run: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::expected::Seen;
    use super::*;

    fn ran(file: &str, status: Status, passed: u32, total: u32) -> Ran {
        Ran {
            file: file.to_owned(),
            seen: Seen { status, failing: (passed + 1..=total).collect(), skip_reason: String::new() },
            passed,
            total,
            todo: 0,
            failed_points: (passed + 1..=total).map(|number| (number, format!("point {number}"))).collect(),
            startup_error: None,
            ending: Ending::Exited(0),
            duration: Duration::from_millis(1500),
            repeated: false,
        }
    }

    #[test]
    fn areas_add_up_and_changes_are_listed() {
        let regression = Verdict::Regression { expected: Status::Pass, failing_anew: vec![3] };
        let report = Report::new(
            "nginx version: nginx/1.31.5".into(),
            None,
            vec![
                (ran("http_host.t", Status::Pass, 5, 5), Verdict::AsExpected),
                (ran("http_uri.t", Status::Differs, 2, 3), regression),
                (ran("rewrite.t", Status::Pass, 1, 1), Verdict::News { what: "passes".into() }),
                (ran("ssi.t", Status::Skip, 0, 0), Verdict::NotBuilt { reason: "later".into() }),
            ],
        );
        let core = report.areas["http core"];
        assert_eq!((core.files, core.pass, core.differs, core.regressions), (2, 1, 1, 1));
        assert_eq!((report.total.points, report.total.points_passed, report.total.skip), (9, 8, 1));
        let text = report.text();
        assert!(text.contains("http_uri.t: differs, 2 of 3"), "{text}");
        assert!(text.contains("not ok 3 - point 3"), "{text}");
        assert!(text.contains("rewrite.t: passes"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["files"][1]["verdict"], "regression");
        assert_eq!(json["files"][0]["status"], "pass");
    }
}
