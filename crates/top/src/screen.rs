//! The terminal: keys, and drawing.
//!
//! A separate thread requests the figures, so that keys work while a server does not respond. At most one request is in
//! flight; quitting abandons it.

use std::io::{self, Stdout, Write};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier, Style};
use ratatui_core::terminal::{Frame, Terminal};
use ratatui_core::text::{Line, Span};
use ratatui_core::widgets::Widget;
use ratatui_crossterm::CrosstermBackend;
use ratatui_crossterm::crossterm::cursor::{Hide, Show};
use ratatui_crossterm::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui_crossterm::crossterm::execute;
use ratatui_crossterm::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};

use super::figures::Figures;
use super::history::History;
use super::source::Source;
use super::table::{Part, Sort, Tone, visible};
use super::views::{self, View};

/// Interval between checks for a response while waiting for keys.
const TICK: Duration = Duration::from_millis(50);

/// Lines of every screen: two for the head, one for the list of views, one for the keys.
const LINES_FIXED: u16 = 4;

const KEYS: &str = "q quit  1-5 Tab view  Left Right sort  r reverse  Up Down scroll  Space pause";

/// Shows the figures of `source` until the user quits.
///
/// # Errors
/// If the terminal cannot be used.
pub fn show(source: Source, history: History, interval: Duration) -> Result<(), String> {
    let told = |error: io::Error| format!("the terminal cannot be used: {error}");
    let (ask, answers) = begin_asking(source)?;
    let _guard = Guard::begin().map_err(told)?;
    let mut terminal = Terminal::new(CrosstermBackend::new(io::stdout())).map_err(told)?;
    run(&mut terminal, &mut Screen::new(history), &ask, &answers, interval).map_err(told)
}

/// Puts the terminal into raw mode on the alternate screen, and restores it when dropped.
struct Guard;

impl Guard {
    fn begin() -> io::Result<Guard> {
        enable_raw_mode()?;
        let guard = Guard;
        execute!(io::stdout(), EnterAlternateScreen, Hide)?;
        Ok(guard)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // Errors are ignored: the terminal may be gone.
        let _ = execute!(io::stdout(), Show, LeaveAlternateScreen);
        let _ = io::stdout().flush();
        let _ = disable_raw_mode();
    }
}

type Answer = Result<Figures, String>;

fn begin_asking(mut source: Source) -> Result<(Sender<()>, Receiver<Answer>), String> {
    let (ask, asked) = mpsc::channel::<()>();
    let (answer, answers) = mpsc::channel();
    let run = move || {
        // Ends when the screen drops its channel ends.
        while asked.recv().is_ok() && answer.send(source().and_then(|text| Figures::parse(&text))).is_ok() {}
    };
    let spawned = thread::Builder::new().name("figures".to_owned()).spawn(run);
    spawned.map_err(|error| format!("a thread cannot be started: {error}"))?;
    Ok((ask, answers))
}

fn run(
    terminal: &mut Terminal<CrosstermBackend<Stdout>>,
    screen: &mut Screen,
    ask: &Sender<()>,
    answers: &Receiver<Answer>,
    interval: Duration,
) -> io::Result<()> {
    let (mut is_asking, mut next) = (false, Instant::now() + interval);
    loop {
        terminal.draw(|frame| screen.draw(frame))?;
        // Waits until there is something new to draw.
        loop {
            match answers.try_recv() {
                Ok(answer) => {
                    screen.take(answer);
                    (is_asking, next) = (false, Instant::now() + interval);
                    break;
                }
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return Err(io::Error::other("the request thread has ended")),
            }
            let left = next.saturating_duration_since(Instant::now());
            if !is_asking && !screen.is_paused && left.is_zero() {
                is_asking = ask.send(()).is_ok();
            }
            // The timeout also applies while paused, although only keys matter then.
            let patience = if is_asking { TICK } else { left.max(TICK) };
            if event::poll(patience)? {
                match event::read()? {
                    Event::Key(key) if key.kind != KeyEventKind::Release => {
                        if screen.handle_key(key) == Wish::Quit {
                            return Ok(());
                        }
                        break;
                    }
                    Event::Resize(..) => break,
                    _ => {}
                }
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Wish {
    GoOn,
    Quit,
}

struct Screen {
    history: History,
    view: View,
    /// Sort order of each view's first table.
    sorts: [Option<Sort>; View::ALL.len()],
    /// Number of lines scrolled out above the first visible one.
    scrolled: usize,
    /// At the last drawing: number of lines that fit, and number of lines in total.
    room: usize,
    lines: usize,
    is_paused: bool,
    /// Error of the last request, if the figures are out of date.
    trouble: Option<String>,
}

impl Screen {
    fn new(history: History) -> Screen {
        Screen {
            history,
            view: View::Totals,
            sorts: [None; View::ALL.len()],
            scrolled: 0,
            room: 0,
            lines: 0,
            is_paused: false,
            trouble: None,
        }
    }

    fn take(&mut self, answer: Answer) {
        match answer {
            Ok(figures) => {
                self.history.take(figures, Instant::now());
                self.trouble = None;
            }
            Err(why) => self.trouble = Some(visible(&why)),
        }
    }

    fn handle_key(&mut self, key: KeyEvent) -> Wish {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c' | 'd') if is_control => return Wish::Quit,
            KeyCode::Char('q') | KeyCode::Esc => return Wish::Quit,
            KeyCode::Char(digit @ '1'..='5') => self.turn_to(digit as usize - '1' as usize),
            KeyCode::Tab => self.turn_to(self.place() + 1),
            KeyCode::BackTab => self.turn_to(self.place() + View::ALL.len() - 1),
            KeyCode::Right | KeyCode::Char('>') => self.sort_by_next(true),
            KeyCode::Left | KeyCode::Char('<') => self.sort_by_next(false),
            KeyCode::Char('r') => self.reverse(),
            KeyCode::Char(' ' | 'p') => self.is_paused = !self.is_paused,
            KeyCode::Down | KeyCode::Char('j') => self.scroll(1),
            KeyCode::Up | KeyCode::Char('k') => self.scroll(-1),
            KeyCode::PageDown => self.scroll(self.room as isize),
            KeyCode::PageUp => self.scroll(-(self.room as isize)),
            KeyCode::Home => self.scroll(isize::MIN),
            KeyCode::End => self.scroll(isize::MAX),
            _ => {}
        }
        Wish::GoOn
    }

    fn place(&self) -> usize {
        self.view as usize
    }

    fn turn_to(&mut self, place: usize) {
        self.view = View::ALL[place % View::ALL.len()];
        self.scrolled = 0;
    }

    /// Selects the next or previous column to sort by. Numbers are sorted in descending order, names in ascending
    /// order.
    fn sort_by_next(&mut self, is_forward: bool) {
        let columns = self.view.tables(&self.history).first().map_or(1, |table| table.columns.len());
        let sort = &mut self.sorts[self.view as usize];
        let column = match (*sort, is_forward) {
            (None, true) => 0,
            (None, false) => columns - 1,
            (Some(sort), true) => (sort.column + 1) % columns,
            (Some(sort), false) => (sort.column + columns - 1) % columns,
        };
        *sort = Some(Sort { column, is_descending: column > 0 });
    }

    fn reverse(&mut self) {
        let sort = &mut self.sorts[self.view as usize];
        let now = sort.unwrap_or(Sort { column: 0, is_descending: false });
        *sort = Some(Sort { is_descending: !now.is_descending, ..now });
    }

    fn scroll(&mut self, lines: isize) {
        let end = self.lines.saturating_sub(self.room);
        self.scrolled = self.scrolled.saturating_add_signed(lines).min(end);
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let area = frame.area();
        let mut at = area.y;
        let mut put = |line: Line<'_>| {
            if at < area.bottom() {
                frame.render_widget(line, Rect { y: at, height: 1, ..area });
                at += 1;
            }
        };
        for text in views::head(&self.history) {
            put(Line::raw(text));
        }
        put(self.tabs());
        self.room = usize::from(area.height.saturating_sub(LINES_FIXED));
        let lines = self.body(usize::from(area.width));
        self.lines = lines.len();
        self.scrolled = self.scrolled.min(self.lines.saturating_sub(self.room));
        for line in lines.into_iter().skip(self.scrolled).take(self.room) {
            put(line);
        }
        if area.height > 0 {
            self.foot().render(Rect { y: area.bottom() - 1, height: 1, ..area }, frame.buffer_mut());
        }
    }

    fn tabs(&self) -> Line<'static> {
        let tab = |(index, view): (usize, &View)| {
            let style = if *view == self.view { Modifier::REVERSED } else { Modifier::empty() };
            [Span::styled(format!(" {} {} ", index + 1, view.name()), Style::new().add_modifier(style)), Span::raw(" ")]
        };
        Line::from(View::ALL.iter().enumerate().flat_map(tab).collect::<Vec<_>>())
    }

    fn body(&self, width: usize) -> Vec<Line<'static>> {
        let mut lines = Vec::new();
        for (index, table) in self.view.tables(&self.history).into_iter().enumerate() {
            let sort = if index == 0 { self.sorts[self.view as usize] } else { None };
            let mut rows = table.lines(width, sort);
            if index == 0 {
                // The list of views already shows the title of the first table.
                rows.remove(0);
                if rows.is_empty() {
                    rows.push(vec![("none".to_owned(), Tone::Heading)]);
                }
            } else {
                rows.insert(0, Vec::new());
            }
            lines.extend(rows.into_iter().map(line));
        }
        lines
    }

    fn foot(&self) -> Line<'static> {
        match (&self.trouble, self.is_paused) {
            (Some(why), _) => Line::styled(format!("the figures are outdated: {why}"), style(Tone::Bad)),
            (None, true) => Line::styled(format!("paused  {KEYS}"), style(Tone::Sorted)),
            (None, false) => Line::styled(KEYS, style(Tone::Heading)),
        }
    }
}

fn line(parts: Vec<Part>) -> Line<'static> {
    Line::from(parts.into_iter().map(|(text, tone)| Span::styled(text, style(tone))).collect::<Vec<_>>())
}

/// Uses the terminal's own colours, so that the text is readable on light and dark backgrounds.
fn style(tone: Tone) -> Style {
    match tone {
        Tone::Plain => Style::new(),
        Tone::Title => Style::new().add_modifier(Modifier::BOLD),
        Tone::Heading => Style::new().add_modifier(Modifier::DIM),
        Tone::Sorted => Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED),
        Tone::Good => Style::new().fg(Color::Green),
        Tone::Doubtful => Style::new().fg(Color::Yellow),
        Tone::Bad => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui_core::backend::TestBackend;

    fn screen() -> Screen {
        let mut history = History::default();
        history.take(Figures::parse(include_str!("test_figures.json")).unwrap(), Instant::now());
        Screen::new(history)
    }

    fn drawn(screen: &mut Screen, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    fn press(screen: &mut Screen, code: KeyCode) -> Wish {
        screen.handle_key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn every_size_and_view_is_drawn() {
        let mut screen = screen();
        for (width, height) in [(80, 24), (200, 60), (20, 5), (1, 1), (3, 2), (80, 4)] {
            for _ in 0..View::ALL.len() {
                drawn(&mut screen, width, height);
                [KeyCode::Right, KeyCode::End, KeyCode::PageUp, KeyCode::Char('r'), KeyCode::Left, KeyCode::Tab]
                    .into_iter()
                    .for_each(|key| assert_eq!(press(&mut screen, key), Wish::GoOn));
            }
        }
    }

    #[test]
    fn keys_turn_to_views_sort_and_quit() {
        let mut screen = screen();
        assert!(drawn(&mut screen, 80, 24).contains("time to first byte p99"));
        press(&mut screen, KeyCode::Char('3'));
        let text = drawn(&mut screen, 80, 24);
        assert!(text.contains("10.0.0.1:80") && text.contains("draining"), "{text}");
        press(&mut screen, KeyCode::Right);
        press(&mut screen, KeyCode::Right);
        assert_eq!(screen.sorts[2], Some(Sort { column: 1, is_descending: true }));
        press(&mut screen, KeyCode::BackTab);
        let text = drawn(&mut screen, 80, 24);
        assert!(text.contains("site?[31m") && text.contains("p99"), "{text}");
        screen.take(Err("gone\u{1b}[2J".to_owned()));
        assert!(drawn(&mut screen, 80, 24).contains("the figures are outdated: gone?[2J"));
        assert_eq!(press(&mut screen, KeyCode::Esc), Wish::Quit);
        assert_eq!(screen.handle_key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Wish::Quit);
    }
}
