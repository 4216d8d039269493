//! The report as text for a terminal.

use std::fmt::{self, Display, Formatter};

use crate::report::{Directive, Report, Severity, SourceLine, Verdict};

/// Maximum width of a column of names.
const NAME_WIDTH_MAX: usize = 36;

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (files, statements) = (self.files, self.statements);
        writeln!(f, "{files} {}, {statements} {}", plural(files, "file"), plural(statements, "directive"))?;
        if !self.problems.is_empty() {
            writeln!(f, "\nErrors ({})", self.problems.len())?;
        }
        for problem in &self.problems {
            writeln!(f, "  {}{}", problem.message, InFile(problem.place.as_ref()))?;
            if let Some(hint) = &problem.hint {
                writeln!(f, "    hint: {hint}")?;
            }
        }
        self.section(f, "Not supported: Gale rejects the configuration", Verdict::Missing)?;
        self.section(f, "Not in a module documented by nginx", Verdict::Unknown)?;
        self.section(f, "Different", Verdict::Different)?;
        self.section(f, "No effect, with a warning", Verdict::NoEffect)?;
        self.section(f, "Gale's own", Verdict::Own)?;
        let same: Vec<&str> = self.of(Verdict::Same).map(|directive| directive.name.as_str()).collect();
        if !same.is_empty() {
            writeln!(f, "\nThe same ({})", same.len())?;
            wrapped(f, &same)?;
        }
        if !self.findings.is_empty() {
            writeln!(f, "\nUnsafe ({})", self.findings.len())?;
        }
        for (number, finding) in self.findings.iter().enumerate() {
            let severity = match finding.severity {
                Severity::High => "high",
                Severity::Medium => "medium",
                Severity::Low => "low",
            };
            writeln!(f, "  {}: {} [{}, {severity}]", Brief(&finding.place), finding.message, finding.check)?;
            // Advice is printed once per check.
            if self.findings.get(number + 1).is_none_or(|next| next.check != finding.check) {
                writeln!(f, "    {}", finding.advice)?;
            }
        }
        Ok(())
    }
}

impl Report {
    fn of(&self, verdict: Verdict) -> impl Iterator<Item = &Directive> {
        self.directives.iter().filter(move |directive| directive.verdict == verdict)
    }

    fn section(&self, f: &mut Formatter<'_>, title: &str, verdict: Verdict) -> fmt::Result {
        let count = self.of(verdict).count();
        if count == 0 {
            return Ok(());
        }
        writeln!(f, "\n{title} ({count})")?;
        let width = self.of(verdict).map(|directive| directive.name.len()).max().unwrap_or(0).min(NAME_WIDTH_MAX);
        for directive in self.of(verdict) {
            let times = if directive.count > 1 { format!(", {} times", directive.count) } else { String::new() };
            let first = directive.places.first().map_or_else(String::new, |place| Brief(place).to_string());
            writeln!(f, "  {:width$}  {first}{times}", directive.name)?;
            if !directive.text.is_empty() {
                writeln!(f, "    {}", directive.text.replace('`', ""))?;
            }
            if let Some(more) = &directive.more {
                writeln!(f, "    docs/{more}")?;
            }
        }
        Ok(())
    }
}

/// Writes names, as many per line as fit.
fn wrapped(f: &mut Formatter<'_>, names: &[&str]) -> fmt::Result {
    const WIDTH: usize = 100;
    let mut column = 0;
    for name in names {
        if column + 1 + name.len() > WIDTH {
            writeln!(f)?;
            column = 0;
        }
        let indent = if column == 0 { "  " } else { " " };
        write!(f, "{indent}{name}")?;
        column += indent.len() + name.len();
    }
    writeln!(f)
}

/// `FILE:LINE`
struct Brief<'p>(&'p SourceLine);

impl Display for Brief<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.0.file, self.0.line)
    }
}

/// ` in FILE:LINE`, or nothing if there is no place.
struct InFile<'p>(Option<&'p SourceLine>);

impl Display for InFile<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |place| write!(f, " in {}", Brief(place)))
    }
}

fn plural(count: usize, noun: &'static str) -> String {
    if count == 1 { noun.to_owned() } else { format!("{noun}s") }
}
