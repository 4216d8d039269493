//! `gale top`: what a server does, in a terminal or as a page of text.
//!
//! ```text
//!   source.rs    where figures come from: a function, or a URL
//!   figures.rs   what is read of them
//!   history.rs   the last answers, and what they say together: rates, times of the last half minute
//!   views.rs     what is shown: tables, by view
//!   table.rs     a table as lines of a given width, sorted
//!   number.rs    how numbers are written
//!   screen.rs    the terminal: keys, drawing
//! ```
//!
//! Nothing that a server says reaches the terminal as it came: control characters are replaced, and an answer is read
//! up to a bounded length.

mod figures;
mod history;
mod number;
mod screen;
mod source;
mod table;
mod views;

use std::io::{IsTerminal, Write};
use std::thread;
use std::time::{Duration, Instant};

pub use self::source::{Source, of_url};

use self::figures::Figures;
use self::history::History;
use self::views::View;

/// How it is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The time between two questions.
    pub interval: Duration,
    /// One page of text, and no more.
    pub is_once: bool,
}

/// Shows what `source` tells: on the terminal until somebody quits, or as a page of text where there is none.
///
/// # Errors
/// The first answer is none, or the terminal cannot be used.
pub fn run(source: Source, options: &Options) -> Result<(), String> {
    show(source, options).map_err(|error| table::visible(&error))
}

fn show(mut source: Source, options: &Options) -> Result<(), String> {
    let mut history = History::default();
    history.take(Figures::parse(&source()?)?, Instant::now());
    let has_terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    let is_dumb = std::env::var_os("TERM").is_none_or(|name| name == "dumb");
    if options.is_once || !has_terminal || is_dumb {
        // Rates are of two answers.
        thread::sleep(options.interval);
        history.take(Figures::parse(&source()?)?, Instant::now());
        // A reader that leaves early is nobody's fault.
        let _ = std::io::stdout().write_all(page(&history).as_bytes());
        return Ok(());
    }
    screen::show(source, history, options.interval)
}

/// All views as text, as wide as they are.
fn page(history: &History) -> String {
    let mut text = String::new();
    for line in views::head(history) {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    for view in View::ALL {
        for table in view.tables(history) {
            text.push('\n');
            for line in table.lines(usize::MAX, None) {
                let line: String = line.into_iter().map(|(part, _)| part).collect();
                text.push_str(line.trim_end());
                text.push('\n');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = include_str!("test_figures.json");

    #[test]
    fn a_page_has_every_view_and_rates_of_two_answers() {
        let mut history = History::default();
        let begin = Instant::now();
        history.take(Figures::parse(FIRST).unwrap(), begin);
        let second = FIRST.replace("\"total\":1000", "\"total\":1500");
        history.take(Figures::parse(&second).unwrap(), begin + Duration::from_secs(2));
        let text = page(&history);
        for part in ["gale-9.9.9", "250/s", "site?[31m", "10.0.0.1:80", "draining", "pages", "80 %", "default"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn garbage_is_an_error() {
        for text in
            ["", "nothing", "[]", "{}", "{\"nginx\":3}", "{\"nginx\":{\"pid\":\"x\"}}", "<html>", "{\"nginx\":{}"]
        {
            let error = Figures::parse(text).map(|_| ()).unwrap_err();
            assert!(error.starts_with("the answer contains no figures"), "{error}");
        }
    }
}
