//! A table as lines of a given width, sorted.
//!
//! The first column takes the width left over by the others, and at least 24 columns of the terminal if it needs them.
//! Columns that do not fit are omitted, beginning at the right.

use ratatui_core::text::Span;

/// Minimum width of the first column: enough for an IPv4 address with port.
const FIRST_WIDTH_MIN: usize = 24;

/// Maximum width of a name in output of unlimited width.
const NAME_WIDTH_MAX: usize = 60;

/// Style of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    #[default]
    Plain,
    /// Title of a table.
    Title,
    /// Title of a column.
    Heading,
    /// Title of the column by which the rows are sorted.
    Sorted,
    Good,
    Doubtful,
    Bad,
}

/// A piece of a line with its style.
pub type Part = (String, Tone);

/// A value in a row.
#[derive(Clone, Debug)]
pub struct Cell {
    pub text: String,
    /// Sort key of a number; texts are sorted by themselves.
    order: Option<f64>,
    tone: Tone,
}

impl Cell {
    /// A name from the configuration or from a client. Characters that could control the terminal are replaced.
    pub fn name(text: &str) -> Cell {
        Cell { text: visible(text), order: None, tone: Tone::Plain }
    }

    /// A formatted number, sorted by `order`.
    pub fn number(text: String, order: f64) -> Cell {
        Cell { text, order: Some(order), tone: Tone::Plain }
    }

    pub fn toned(self, tone: Tone) -> Cell {
        Cell { tone, ..self }
    }

    /// Marks the cell as bad on a condition.
    pub fn bad_if(self, is_bad: bool) -> Cell {
        if is_bad { self.toned(Tone::Bad) } else { self }
    }
}

/// Replaces control characters and characters that change the direction of the text after them.
pub fn visible(text: &str) -> String {
    let is_hidden = |letter: char| {
        letter.is_control()
            || matches!(letter, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().map(|letter| if is_hidden(letter) { '?' } else { letter }).collect()
}

/// Sort column and direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sort {
    pub column: usize,
    pub is_descending: bool,
}

/// Rows with the same columns.
#[derive(Clone, Debug)]
pub struct Table {
    pub title: &'static str,
    pub columns: &'static [&'static str],
    pub rows: Vec<Vec<Cell>>,
}

impl Table {
    /// Formats the title, the headings and the rows.
    pub fn lines(mut self, width: usize, sort: Option<Sort>) -> Vec<Vec<Part>> {
        if let Some(sort) = sort {
            self.sort(sort);
        }
        let widths = self.widths(width);
        let count = if self.rows.is_empty() { "none".to_owned() } else { self.rows.len().to_string() };
        let mut lines = vec![vec![(format!("{} ({count})", self.title), Tone::Title)]];
        if self.rows.is_empty() {
            return lines;
        }
        let heading = |(column, title): (usize, &&str)| {
            let is_sorted = sort.is_some_and(|sort| sort.column == column);
            (pad(title, widths.get(column).copied(), column == 0), if is_sorted { Tone::Sorted } else { Tone::Heading })
        };
        lines.push(joined(self.columns.iter().take(widths.len()).enumerate().map(heading)));
        for row in &self.rows {
            let cells = row.iter().zip(&widths).enumerate();
            lines.push(joined(
                cells.map(|(column, (cell, width))| (pad(&cell.text, Some(*width), column == 0), cell.tone)),
            ));
        }
        lines
    }

    fn sort(&mut self, sort: Sort) {
        let compare = |left: &Vec<Cell>, right: &Vec<Cell>| match (left.get(sort.column), right.get(sort.column)) {
            (Some(left), Some(right)) => match (left.order, right.order) {
                (Some(left), Some(right)) => left.total_cmp(&right),
                _ => left.text.cmp(&right.text),
            },
            _ => std::cmp::Ordering::Equal,
        };
        // The sort is stable: rows with equal values keep their order.
        self.rows.sort_by(|left, right| {
            let order = compare(left, right);
            if sort.is_descending { order.reverse() } else { order }
        });
    }

    /// Returns the widths of the columns that fit.
    fn widths(&self, width: usize) -> Vec<usize> {
        let longest = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column)).map(|cell| width_of(&cell.text));
            cells.chain([width_of(self.columns[column])]).max().unwrap_or(0)
        };
        let first = longest(0).min(NAME_WIDTH_MAX);
        let mut widths = vec![0];
        let mut left = width.saturating_sub(first.min(FIRST_WIDTH_MIN));
        for column in 1..self.columns.len() {
            let wanted = longest(column).min(NAME_WIDTH_MAX);
            if wanted + 1 > left {
                break;
            }
            left -= wanted + 1;
            widths.push(wanted);
        }
        widths[0] = first.min(left.saturating_add(first.min(FIRST_WIDTH_MIN)));
        widths
    }
}

fn joined(parts: impl Iterator<Item = Part>) -> Vec<Part> {
    let mut line = Vec::new();
    for (index, part) in parts.enumerate() {
        if index > 0 {
            line.push((" ".to_owned(), Tone::Plain));
        }
        line.push(part);
    }
    line
}

/// Returns the width of a text in columns of the terminal.
fn width_of(text: &str) -> usize {
    if text.is_ascii() { text.len() } else { Span::raw(text).width() }
}

/// Cuts or pads a text to this width: at its end for names, at its start for numbers.
fn pad(text: &str, width: Option<usize>, is_left: bool) -> String {
    let width = width.unwrap_or(0);
    let text = cut(text, width);
    let blanks = " ".repeat(width - width_of(&text).min(width));
    if is_left { text + &blanks } else { blanks + &text }
}

/// Cuts a text to this width and marks the cut.
fn cut(text: &str, width: usize) -> String {
    if width_of(text) <= width {
        return text.to_owned();
    }
    let mut kept = String::new();
    let mut taken = 0;
    for letter in text.chars() {
        let own = width_of(letter.encode_utf8(&mut [0; 4]));
        if taken + own + 1 > width {
            break;
        }
        taken += own;
        kept.push(letter);
    }
    if width > 0 {
        kept.push('~');
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let row = |name: &str, count: u64| {
            vec![Cell::name(name), Cell::number(count.to_string(), count as f64), Cell::number("x".repeat(20), 0.0)]
        };
        Table {
            title: "things",
            columns: &["name", "count", "rest"],
            rows: vec![row("b", 9), row("a\u{1b}]0;\u{7}\u{202e}", 10), row("漢字漢字漢字漢字漢字漢字漢字漢字", 1)],
        }
    }

    fn texts(width: usize, sort: Option<Sort>) -> Vec<String> {
        let text = |line: Vec<Part>| line.into_iter().map(|(part, _)| part).collect();
        table().lines(width, sort).into_iter().map(text).collect()
    }

    #[test]
    fn columns_that_have_no_room_are_left_out_and_names_are_cut() {
        for width in [0, 1, 5, 23, 24, 25, 29, 30, 50, 51, 80] {
            for line in texts(width, None).iter().skip(1) {
                assert!(width_of(line) <= width.max(FIRST_WIDTH_MIN), "{width}: {line:?}");
            }
        }
        let lines = texts(30, None);
        assert_eq!(lines[0], "things (3)");
        assert_eq!(lines[1], format!("{:24} count", "name"));
        assert_eq!(lines[2], format!("{:24} {:>5}", "b", 9));
        assert!(lines[4].contains('~'), "{lines:?}");
        assert!(texts(80, None)[1].ends_with("rest"));
        assert_eq!(texts(usize::MAX, None)[3].split_whitespace().next(), Some("a?]0;??"));
    }

    #[test]
    fn numbers_are_sorted_as_numbers() {
        let first = |column, is_descending| texts(40, Some(Sort { column, is_descending }))[2].chars().next();
        assert_eq!(first(1, true), Some('a'));
        assert_eq!(first(1, false), Some('漢'));
        assert_eq!(first(0, false), Some('a'));
        assert_eq!(first(7, false), Some('b'), "a column that is not there changes nothing");
    }
}
