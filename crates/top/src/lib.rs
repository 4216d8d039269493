//! `gale top`: live figures of a server, in a terminal or as a page of text.
//!
//! ```text
//!   source.rs    the source of figures: a function, or a URL
//!   figures.rs   the figures in a response
//!   history.rs   the latest responses, and figures computed from them: rates, times of the last half minute
//!   views.rs     the tables of each view
//!   table.rs     a table as lines of a given width, sorted
//!   number.rs    formatting of numbers
//!   screen.rs    the terminal: keys, drawing
//! ```
//!
//! No text from a server reaches the terminal unfiltered: control characters are replaced, and the length of a response
//! is bounded.

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

/// Display options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Time between two requests.
    pub interval: Duration,
    /// Print one page of text and exit.
    pub is_once: bool,
}

/// Shows the figures of `source`: in the terminal until the user quits, or as a page of text if there is no terminal.
///
/// # Errors
/// If the first response contains no figures or the terminal cannot be used.
pub fn run(source: Source, options: &Options) -> Result<(), String> {
    show(source, options).map_err(|error| table::visible(&error))
}

fn show(mut source: Source, options: &Options) -> Result<(), String> {
    let mut history = History::default();
    history.take(Figures::parse(&source()?)?, Instant::now());
    let has_terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    let is_dumb = std::env::var_os("TERM").is_none_or(|name| name == "dumb");
    if options.is_once || !has_terminal || is_dumb {
        // A rate needs two responses.
        thread::sleep(options.interval);
        history.take(Figures::parse(&source()?)?, Instant::now());
        // Output errors are ignored: the reader may close the pipe early.
        let _ = std::io::stdout().write_all(page(&history).as_bytes());
        return Ok(());
    }
    screen::show(source, history, options.interval)
}

/// Formats all views as text of unlimited width.
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

#[doc(hidden)]
pub mod fuzzing {
    //! Body of the fuzz target `top_figures`.

    use super::*;

    /// Draws a page of these figures, and lines of a narrow terminal.
    ///
    /// # Panics
    /// If a control character is drawn.
    pub fn draw(text: &str) {
        let mut history = History::default();
        let begin = Instant::now();
        for seconds in 0..2 {
            let Ok(figures) = Figures::parse(text) else { return };
            history.take(figures, begin + Duration::from_secs(seconds));
        }
        let page = page(&history);
        assert!(page.lines().all(|line| !line.chars().any(char::is_control)), "{page:?}");
        for view in View::ALL {
            for table in view.tables(&history) {
                table.lines(20, None);
            }
        }
    }
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
