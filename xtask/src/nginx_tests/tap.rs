//! Parses the output of a test file: the Test Anything Protocol as written by Perl's Test::More.
//!
//! The expected results are in `expected.rs`. Lines that are not TAP (output of a backend,
//! indented subtests) are skipped, so every text parses. Invariant: `points` holds all test points of the output in
//! order, whatever the plan says.

/// Parsed output of a test file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tap {
    pub plan: Plan,
    pub points: Vec<Point>,
    /// The reason after `Bail out!`.
    pub bail_out: Option<String>,
}

/// Number of test points announced by the file.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Plan {
    /// The file ended before it announced a plan.
    #[default]
    Missing,
    Count(u32),
    /// `1..0 # SKIP reason`: the file does not apply.
    SkipAll(String),
}

/// An `ok` or `not ok` line.
#[derive(Debug, PartialEq, Eq)]
pub struct Point {
    /// The number printed, or the previous one plus one.
    pub number: u32,
    pub name: String,
    pub outcome: Outcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Passed,
    Failed,
    /// `ok # SKIP`: counts as passed.
    Skipped,
    /// `not ok # TODO`: the suite allows it to fail.
    Todo,
}

impl Tap {
    /// Parses a whole output. Invalid UTF-8 occurs in names only, so the caller may replace it.
    pub fn parse(output: &str) -> Tap {
        let mut tap = Tap::default();
        for line in output.lines() {
            let line = line.trim_end();
            if let Some(reason) = line.strip_prefix("Bail out!") {
                tap.bail_out = Some(reason.trim().to_owned());
            } else if let Some(plan) = parse_plan(line) {
                tap.plan = plan;
            } else if let Some(point) = parse_point(line, tap.points.last().map_or(1, |last| last.number + 1)) {
                tap.points.push(point);
            }
        }
        tap
    }

    /// Returns the numbers of points that failed or were announced and are missing.
    pub fn failing(&self) -> Vec<u32> {
        let mut failing: Vec<u32> =
            self.points.iter().filter(|point| point.outcome == Outcome::Failed).map(|point| point.number).collect();
        failing.extend(self.missing());
        failing.sort_unstable();
        failing.dedup();
        failing
    }

    /// Returns the number of points that passed, were skipped, or are marked TODO.
    pub fn passed(&self) -> u32 {
        self.points.iter().filter(|point| point.outcome != Outcome::Failed).count() as u32
    }

    /// Returns the number of points, seen or announced, whichever is larger.
    pub fn total(&self) -> u32 {
        let announced = match self.plan {
            Plan::Count(count) => count,
            Plan::Missing | Plan::SkipAll(_) => 0,
        };
        announced.max(self.points.len() as u32)
    }

    /// Returns the number of failed points that are marked TODO.
    pub fn todo(&self) -> u32 {
        self.points.iter().filter(|point| point.outcome == Outcome::Todo).count() as u32
    }

    /// Returns true if all announced points are present, in any order, and none failed.
    pub fn is_success(&self) -> bool {
        matches!(self.plan, Plan::Count(count) if count as usize == self.points.len())
            && self.bail_out.is_none()
            && self.failing().is_empty()
    }

    fn missing(&self) -> impl Iterator<Item = u32> + '_ {
        // Bound for a broken output. No file of the suite has a tenth of this.
        const POINTS_MAX: u32 = 100_000;
        let announced = match self.plan {
            Plan::Count(count) => count.min(POINTS_MAX),
            Plan::Missing | Plan::SkipAll(_) => 0,
        };
        let seen: std::collections::HashSet<u32> = self.points.iter().map(|point| point.number).collect();
        (1..=announced).filter(move |number| !seen.contains(number))
    }
}

fn parse_plan(line: &str) -> Option<Plan> {
    let rest = line.strip_prefix("1..")?;
    let (count, directive) = match rest.split_once('#') {
        Some((count, directive)) => (count, directive.trim()),
        None => (rest, ""),
    };
    let count: u32 = count.trim().parse().ok()?;
    match (count, strip_word(directive, "skip")) {
        (0, Some(reason)) => Some(Plan::SkipAll(reason.to_owned())),
        (0, None) => Some(Plan::SkipAll(directive.to_owned())),
        _ => Some(Plan::Count(count)),
    }
}

fn parse_point(line: &str, next_number: u32) -> Option<Point> {
    let (ok, rest) = match line.strip_prefix("not ok") {
        Some(rest) => (false, rest),
        None => (true, line.strip_prefix("ok")?),
    };
    if !rest.is_empty() && !rest.starts_with(' ') {
        return None; // "okay, …" is not a test point
    }
    let rest = rest.trim_start();
    let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let number = if digits == 0 { next_number } else { rest[..digits].parse().ok()? };
    let (name, directive) = split_directive(rest[digits..].trim_start());
    let outcome = match (ok, directive) {
        (true, Some(Directive::Skip)) => Outcome::Skipped,
        (true, _) => Outcome::Passed,
        (false, Some(Directive::Todo)) => Outcome::Todo,
        (false, _) => Outcome::Failed,
    };
    Some(Point { number, name: name.trim_start_matches('-').trim().to_owned(), outcome })
}

#[derive(Clone, Copy)]
enum Directive {
    Skip,
    Todo,
}

/// Splits the directive off, which follows the last ` # `. Test::More writes a `#` in a name as `\#`.
fn split_directive(text: &str) -> (&str, Option<Directive>) {
    let Some(at) = text.rfind("# ").filter(|at| !text[..*at].ends_with('\\')) else {
        return (text, None);
    };
    let (name, directive) = (&text[..at], text[at + 1..].trim());
    if strip_word(directive, "todo").is_some() {
        (name, Some(Directive::Todo))
    } else if strip_word(directive, "skip").is_some() {
        (name, Some(Directive::Skip))
    } else {
        (text, None)
    }
}

/// Removes a leading word, ignoring case. Returns `None` if the text begins with another word.
fn strip_word<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    let head = text.get(..word.len())?;
    let rest = &text[word.len()..];
    (head.eq_ignore_ascii_case(word) && (rest.is_empty() || rest.starts_with(' '))).then(|| rest.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_whose_points_all_pass_succeeds() {
        let tap = Tap::parse("1..3\nok 1 - first\nok 2\nok 3 - third # not a directive\n");
        assert!(tap.is_success());
        assert_eq!((tap.passed(), tap.total(), tap.todo()), (3, 3, 0));
        assert_eq!(tap.points[0].name, "first");
        assert_eq!(tap.points[1].name, "");
        assert_eq!(tap.points[2].name, "third # not a directive");
    }

    #[test]
    fn failures_are_listed_by_number() {
        let tap = Tap::parse("1..3\nok 1 - a\nnot ok 2 - b\n#   Failed test 'b'\nok 3 - c\n");
        assert!(!tap.is_success());
        assert_eq!(tap.failing(), [2]);
        assert_eq!((tap.passed(), tap.total()), (2, 3));
    }

    #[test]
    fn points_that_never_came_count_as_failing() {
        let tap = Tap::parse("1..4\nok 1\nok 2\n");
        assert!(!tap.is_success());
        assert_eq!(tap.failing(), [3, 4]);
        assert_eq!((tap.passed(), tap.total()), (2, 4));
    }

    #[test]
    fn a_skipped_file_keeps_its_reason() {
        assert_eq!(Tap::parse("1..0 # SKIP no perl available\n").plan, Plan::SkipAll("no perl available".into()));
        assert_eq!(Tap::parse("1..0 # skip\n").plan, Plan::SkipAll(String::new()));
    }

    #[test]
    fn excused_failures_and_skipped_points_do_not_fail_the_file() {
        let tap =
            Tap::parse("1..3\nnot ok 1 - later # TODO not yet\nok 2 # skip no IPv6\nok 3 - done # TODO not yet\n");
        assert!(tap.is_success());
        assert_eq!(tap.todo(), 1);
        let outcomes: Vec<Outcome> = tap.points.iter().map(|point| point.outcome).collect();
        assert_eq!(outcomes, [Outcome::Todo, Outcome::Skipped, Outcome::Passed]);
        assert_eq!(tap.points[0].name, "later");
    }

    #[test]
    fn a_directive_needs_its_hash_unescaped_and_its_word_whole() {
        assert_eq!(Tap::parse("not ok 1 - say \\# TODO\n").points[0].outcome, Outcome::Failed);
        assert_eq!(Tap::parse("not ok 1 - say # TODOS\n").points[0].outcome, Outcome::Failed);
    }

    #[test]
    fn missing_numbers_are_counted_on() {
        let tap = Tap::parse("ok\nok 5 - five\nnot ok - six\n1..3\n");
        let numbers: Vec<u32> = tap.points.iter().map(|point| point.number).collect();
        assert_eq!(numbers, [1, 5, 6]);
        assert_eq!(tap.plan, Plan::Count(3));
    }

    #[test]
    fn more_points_than_announced_is_no_success() {
        assert!(!Tap::parse("1..1\nok 1\nok 2\n").is_success());
        assert!(!Tap::parse("ok 1\n").is_success());
        assert!(!Tap::parse("").is_success());
    }

    #[test]
    fn bailing_out_is_no_success() {
        let tap = Tap::parse("1..1\nok 1\nBail out!  no nginx binary found\n");
        assert_eq!(tap.bail_out.as_deref(), Some("no nginx binary found"));
        assert!(!tap.is_success());
    }

    #[test]
    fn other_lines_are_passed_over() {
        let tap =
            Tap::parse("TAP version 13\n# note\n    ok 1 - nested\nokay\nnotok 1\n1..x\nok 99999999999\n\u{fffd}\n");
        assert_eq!(tap, Tap::default());
    }

    #[test]
    fn an_absurd_plan_does_not_exhaust_memory() {
        assert_eq!(Tap::parse("1..4294967295\n").failing().len(), 100_000);
    }
}
