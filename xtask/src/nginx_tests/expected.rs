//! Reads and writes tests/nginx/expected.toml, and compares runs with it.
//!
//! It runs nothing, and of TAP it uses only the numbers of test points. Every file that does not pass needs a reason;
//! `unexplained` lists those without. Invariants: `render` writes what `parse` reads, and a run compared with its own
//! record has no regression.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::suite::{self, Pattern};

/// Content of expected.toml.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expectations {
    /// Commit of the suite that the test point numbers refer to.
    #[serde(default)]
    pub suite: Option<String>,
    /// Groups of files without entries of their own. The first that matches applies.
    #[serde(default)]
    pub default: Vec<Unrecorded>,
    #[serde(default)]
    pub files: BTreeMap<String, Entry>,
}

/// A group of files without expected results, and the reason.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unrecorded {
    pub reason: String,
    /// Areas, or globs for file names (which end in `.t`).
    #[serde(rename = "match")]
    pub patterns: Vec<Pattern>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    pub status: Status,
    /// Reason why the file does not pass. Required unless it passes.
    #[serde(default)]
    pub reason: String,
    /// Numbers of the failing test points. If empty, none are recorded, and any may fail.
    #[serde(default)]
    pub failing: Vec<u32>,
}

/// Result of a file, expected or actual.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Pass,
    Differs,
    Skip,
}

impl Status {
    pub fn name(self) -> &'static str {
        match self {
            Status::Pass => "pass",
            Status::Differs => "differs",
            Status::Skip => "skip",
        }
    }
}

/// Actual result of a file, as far as it is compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub status: Status,
    /// Numbers of the test points that failed or are missing.
    pub failing: Vec<u32>,
    /// The suite's reason for skipping the file; empty if it was not skipped.
    pub skip_reason: String,
}

/// Comparison of a file with its expected result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
pub enum Verdict {
    /// As recorded.
    AsExpected,
    /// Does not pass, as a default allows.
    NotBuilt { reason: String },
    /// Passed before, or has new failing test points.
    Regression { expected: Status, failing_anew: Vec<u32> },
    /// Better than recorded, or different: expected.toml should be updated.
    News { what: String },
}

impl Expectations {
    /// Parses expected.toml. Errors have the line and column.
    pub fn parse(text: &str) -> Result<Expectations, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }

    /// Compares the result of a file. An unrecorded file is news, never a regression.
    pub fn compare(&self, file: &str, seen: &Seen) -> Verdict {
        let Some(entry) = self.files.get(file) else {
            return match (self.default_for(file), seen.status) {
                (Some(_), Status::Pass) => news("passes, although no result is recorded for it"),
                (Some(default), _) => Verdict::NotBuilt { reason: default.reason.clone() },
                (None, status) => news(&format!("{}, but no result is recorded for it", verb(status))),
            };
        };
        match (entry.status, seen.status) {
            (Status::Differs, Status::Differs) => compare_failing(&entry.failing, &seen.failing),
            (expected, now) if expected == now => Verdict::AsExpected,
            (Status::Pass, _) => Verdict::Regression { expected: Status::Pass, failing_anew: seen.failing.clone() },
            (before, now) => news(&format!("{} (recorded: {})", verb(now), before.name())),
        }
    }

    /// Records new results and keeps the reasons that still apply. A file that does not pass and is covered by a
    /// default gets no entry. With `all_files`, entries of files that are not among them are removed.
    pub fn update(&mut self, results: &BTreeMap<String, Seen>, all_files: Option<&[String]>) {
        for (file, seen) in results {
            let known = self.files.get(file);
            if known.is_none() && seen.status != Status::Pass && self.default_for(file).is_some() {
                continue;
            }
            let reason = match seen.status {
                Status::Pass => String::new(),
                Status::Differs | Status::Skip => match known.map(|entry| entry.reason.clone()) {
                    Some(reason) if !reason.is_empty() => reason,
                    _ => seen.skip_reason.clone(),
                },
            };
            let failing = if seen.status == Status::Differs { seen.failing.clone() } else { Vec::new() };
            self.files.insert(file.clone(), Entry { status: seen.status, reason, failing });
        }
        if let Some(all) = all_files {
            self.files.retain(|file, _| all.contains(file));
        }
    }

    /// Returns the files and defaults that do not pass and have no reason.
    pub fn unexplained(&self) -> Vec<String> {
        let files = self.files.iter().filter(|(_, entry)| entry.status != Status::Pass && entry.reason.is_empty());
        let defaults = self.default.iter().filter(|default| default.reason.is_empty());
        files
            .map(|(file, entry)| format!("{file} ({})", entry.status.name()))
            .chain(defaults.map(|default| format!("the default for {}", join(&default.patterns))))
            .collect()
    }

    /// Returns the text of expected.toml, with one line per file, so that diffs are small.
    pub fn render(&self) -> String {
        let mut text = String::from(HEADER);
        if let Some(suite) = &self.suite {
            let _ = writeln!(text, "suite = {}", quote(suite));
        }
        for default in &self.default {
            let _ = writeln!(text, "\n[[default]]\nreason = {}\nmatch = [", quote(&default.reason));
            for pattern in &default.patterns {
                let _ = writeln!(text, "    {},", quote(pattern.text()));
            }
            text.push_str("]\n");
        }
        text.push_str("\n[files]\n");
        for (file, entry) in &self.files {
            let _ = write!(text, "{} = {{ status = {}", quote(file), quote(entry.status.name()));
            if !entry.failing.is_empty() {
                let _ = write!(text, ", failing = {:?}", entry.failing);
            }
            if entry.status != Status::Pass {
                let _ = write!(text, ", reason = {}", quote(&entry.reason));
            }
            text.push_str(" }\n");
        }
        text
    }

    fn default_for(&self, file: &str) -> Option<&Unrecorded> {
        let area = suite::area(file);
        self.default.iter().find(|default| default.patterns.iter().any(|pattern| pattern.matches(file, area)))
    }
}

/// A file that differs may fail at the recorded test points only.
fn compare_failing(before: &[u32], now: &[u32]) -> Verdict {
    let anew: Vec<u32> = now.iter().copied().filter(|number| !before.contains(number)).collect();
    if before.is_empty() || before == now {
        Verdict::AsExpected
    } else if anew.is_empty() {
        news(&format!("fails {} test points fewer", before.len() - now.len()))
    } else {
        Verdict::Regression { expected: Status::Differs, failing_anew: anew }
    }
}

fn news(what: &str) -> Verdict {
    Verdict::News { what: what.to_owned() }
}

fn verb(status: Status) -> &'static str {
    match status {
        Status::Pass => "passes",
        Status::Differs => "differs",
        Status::Skip => "is skipped",
    }
}

fn join(patterns: &[Pattern]) -> String {
    patterns.iter().map(Pattern::text).collect::<Vec<_>>().join(", ")
}

/// Quotes a TOML string.
fn quote(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

const HEADER: &str = "\
# Expected result of each file of nginx's test suite with Gale: see README.md beside this file.
# Written by `cargo xtask nginx-tests --update`, which keeps the reasons and the defaults; comments are not kept.
#   status   pass | differs | skip
#   reason   why it does not pass (required then)
#   failing  the test points that fail; others that fail later are regressions
";

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = r#"
suite = "abc"
[[default]]
reason = "not built yet"
match = ["proxy", "stream_ssl*.t"]
[files]
"rewrite.t" = { status = "pass" }
"range.t" = { status = "differs", failing = [3, 7], reason = "multipart boundary" }
"body.t" = { status = "differs", reason = "not looked at" }
"perl.t" = { status = "skip", reason = "no embedded Perl" }
"#;

    fn sample() -> Expectations {
        Expectations::parse(SAMPLE).unwrap()
    }

    fn seen(status: Status, failing: &[u32]) -> Seen {
        Seen { status, failing: failing.to_vec(), skip_reason: String::new() }
    }

    #[test]
    fn recorded_results_are_expected() {
        let expected = sample();
        assert_eq!(expected.compare("rewrite.t", &seen(Status::Pass, &[])), Verdict::AsExpected);
        assert_eq!(expected.compare("range.t", &seen(Status::Differs, &[3, 7])), Verdict::AsExpected);
        assert_eq!(expected.compare("perl.t", &seen(Status::Skip, &[])), Verdict::AsExpected);
    }

    #[test]
    fn a_file_that_passed_and_no_longer_does_is_a_regression() {
        let regression = Verdict::Regression { expected: Status::Pass, failing_anew: vec![2] };
        assert_eq!(sample().compare("rewrite.t", &seen(Status::Differs, &[2])), regression);
        assert!(matches!(sample().compare("rewrite.t", &seen(Status::Skip, &[])), Verdict::Regression { .. }));
    }

    #[test]
    fn another_failing_point_in_a_file_that_differs_is_a_regression() {
        let regression = Verdict::Regression { expected: Status::Differs, failing_anew: vec![4] };
        assert_eq!(sample().compare("range.t", &seen(Status::Differs, &[3, 4])), regression);
    }

    #[test]
    fn without_recorded_points_any_may_fail() {
        assert_eq!(sample().compare("body.t", &seen(Status::Differs, &[1, 2])), Verdict::AsExpected);
    }

    #[test]
    fn improvements_are_news() {
        assert!(matches!(sample().compare("range.t", &seen(Status::Differs, &[7])), Verdict::News { .. }));
        assert!(matches!(sample().compare("range.t", &seen(Status::Pass, &[])), Verdict::News { .. }));
        assert!(matches!(sample().compare("proxy.t", &seen(Status::Pass, &[])), Verdict::News { .. }));
        assert!(matches!(sample().compare("perl.t", &seen(Status::Differs, &[1])), Verdict::News { .. }));
    }

    #[test]
    fn a_default_excuses_by_area_and_by_glob() {
        let not_built = Verdict::NotBuilt { reason: "not built yet".into() };
        assert_eq!(sample().compare("proxy_redirect.t", &seen(Status::Differs, &[1])), not_built);
        assert_eq!(sample().compare("stream_ssl_alpn.t", &seen(Status::Skip, &[])), not_built);
        assert!(matches!(sample().compare("stream_map.t", &seen(Status::Differs, &[1])), Verdict::News { .. }));
    }

    #[test]
    fn updating_keeps_reasons_and_drops_them_where_the_file_passes() {
        let mut expected = sample();
        let results = BTreeMap::from([
            ("range.t".to_owned(), seen(Status::Differs, &[7])),
            ("body.t".to_owned(), seen(Status::Pass, &[])),
            ("proxy.t".to_owned(), seen(Status::Differs, &[1])),
            ("proxy_store.t".to_owned(), seen(Status::Pass, &[])),
            ("geoip.t".to_owned(), Seen { skip_reason: "no geoip".into(), ..seen(Status::Skip, &[]) }),
            ("index.t".to_owned(), seen(Status::Differs, &[2])),
        ]);
        expected.update(&results, None);
        assert_eq!(expected.files["range.t"].reason, "multipart boundary");
        assert_eq!(expected.files["range.t"].failing, [7]);
        assert_eq!(expected.files["body.t"].reason, "");
        assert!(!expected.files.contains_key("proxy.t"), "the default covers it");
        assert_eq!(expected.files["proxy_store.t"].status, Status::Pass);
        assert_eq!(expected.files["geoip.t"].reason, "no geoip");
        assert_eq!(expected.unexplained(), ["index.t (differs)"]);
        for (file, result) in &results {
            assert!(!matches!(expected.compare(file, result), Verdict::Regression { .. } | Verdict::News { .. }));
        }
    }

    #[test]
    fn a_full_run_drops_files_that_the_suite_no_longer_has() {
        let mut expected = sample();
        expected.update(&BTreeMap::new(), Some(&["rewrite.t".to_owned()]));
        assert_eq!(expected.files.keys().collect::<Vec<_>>(), ["rewrite.t"]);
    }

    #[test]
    fn the_rendered_text_reads_back() {
        let mut expected = sample();
        expected.files.get_mut("perl.t").unwrap().reason = "says \"no\" \\ twice".into();
        assert_eq!(Expectations::parse(&expected.render()).unwrap(), expected);
    }

    #[test]
    fn unknown_words_are_refused() {
        assert!(Expectations::parse("[files]\n\"a.t\" = { status = \"fine\" }").is_err());
        assert!(Expectations::parse("[files]\n\"a.t\" = { status = \"pass\", resaon = \"\" }").is_err());
        assert!(Expectations::parse("").is_ok());
    }

    #[test]
    fn the_committed_file_reads_and_explains_itself() {
        let expected = Expectations::parse(include_str!("../../../tests/nginx/expected.toml")).unwrap();
        assert_eq!(expected.unexplained(), Vec::<String>::new());
        for default in &expected.default {
            for pattern in &default.patterns {
                assert!(pattern.is_known(), "\"{}\" is neither an area nor a glob", pattern.text());
            }
        }
    }
}
