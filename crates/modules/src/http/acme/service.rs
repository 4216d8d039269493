//! Schedule of one issuer: obtaining missing certificates, renewals, and queries of renewal information.
//!
//! ```text
//!   no certificate ─► obtain ──────────────────────────────┐
//!   a certificate ──► ask for renewal information ─► wait ─┴─► obtain ─► …
//!                                    failure ─► pause: a minute, doubled each time, at most a day
//! ```
//!
//! One certificate at a time. A renewal is due at a random moment of the issuer's window (RFC 9773), or, if the issuer
//! gives none, when a third of the certificate's lifetime is left (half of it for lifetimes up to ten days). After a
//! reload, failed certificates are tried again at once, unless the issuer has asked to wait.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_base::http_date;
use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_runtime::{default_pool, random_u64, timeout, wall_seconds};
use gale_tls::keys;
use gale_tls::managed::{Current, ManagedCertificate, Origin, write_atomically};
use gale_worker::service::{Context, Service};
use serde_json::{Value, json};

use super::client::{Account, AcmeClient, AcmeError};
use super::issuer::{AccountKeySource, Issuer};
use super::jws::AccountKey;
use super::order;
use crate::http::lookup::name_servers;

/// Pause after the first failure, in seconds.
const PAUSE_MIN: u64 = 60;

/// Maximum pause, in seconds; also the pause after a failure that only a change of the configuration can mend.
const PAUSE_MAX: u64 = 86_400;

/// Upper bound of an issuer's `Retry-After`, in seconds.
const RETRY_AFTER_MAX: u64 = 7 * 86_400;

/// Default interval of queries of renewal information, in seconds (RFC 9773, section 4.3).
const INFO_PAUSE: u64 = 6 * 3600;
const INFO_PAUSE_MIN: u64 = 60;
const INFO_PAUSE_MAX: u64 = 86_400;

/// Maximum time between two looks at the clock, in seconds, since the clock may be set.
const SLEEP_MAX: u64 = 3600;

/// Certificates with a longer lifetime, in seconds, are renewed after two thirds of it instead of half.
const SHORT_LIVED: u64 = 10 * 86_400;

pub(super) struct AcmeService {
    pub issuer: Arc<Issuer>,
}

impl Service for AcmeService {
    async fn run(context: Context<AcmeService>) {
        let issuer = Arc::clone(&context.settings().issuer);
        if issuer.certificates().is_empty() {
            return;
        }
        let _own = OwnAnswers::begin(&issuer);
        let mut tasks: Vec<Task> = Vec::new();
        for certificate in issuer.certificates() {
            // Another process may have renewed the certificate since this one read it.
            match certificate.reload().await {
                Ok(current) => tasks.push(Task::begin(certificate, &current)),
                Err(why) => context.log(Level::Error, format_args!("\"{}\": {why}", certificate.name())),
            }
        }
        tasks.iter().for_each(|task| tell_of(&context, &task.certificate));
        let account: RefCell<Option<Rc<Account>>> = RefCell::default();
        while !context.is_stopping() {
            let now = wall_seconds();
            let Some(task) = tasks.iter_mut().min_by_key(|task| task.next()) else { return };
            if task.next() > now {
                let pause = Duration::from_secs((task.next() - now).min(SLEEP_MAX));
                match context.unless_stopping(timeout(pause, context.changed())).await {
                    Some(Ok(())) => tasks.iter_mut().for_each(|task| task.look_again()),
                    Some(Err(_)) => {}
                    None => return,
                }
                continue;
            }
            if context.unless_stopping(task.act(&context, &account)).await.is_none() {
                return;
            }
        }
    }

    fn continues(&self, earlier: &Self) -> bool {
        self.issuer.continues(&earlier.issuer)
    }
}

/// Logs the certificate that clients get at the start.
fn tell_of(context: &Context<AcmeService>, certificate: &ManagedCertificate) {
    let Some(current) = certificate.current() else { return };
    let names = names(certificate);
    if let Some(problem) = certificate.take_problem() {
        context.log(Level::Error, problem);
    }
    let stands_in = |what: &str| {
        context.log(Level::Warn, format_args!("no certificate for \"{names}\" yet: clients get {what}"));
    };
    match current.origin {
        Origin::Issuer => {
            let until = date(current.not_after);
            context.log(Level::Info, format_args!("certificate for \"{names}\" found, valid until {until}"));
        }
        Origin::Earlier => stands_in("an earlier one"),
        Origin::SelfSigned => stands_in("a self-signed one, which no client trusts"),
    }
}

fn date(seconds: u64) -> String {
    String::from_utf8_lossy(&http_date::format(seconds)).into_owned()
}

fn names(certificate: &ManagedCertificate) -> String {
    certificate.wanted().names.join(", ")
}

/// Registers this process as the one that responds to an issuer's challenges, until it is dropped.
struct OwnAnswers(Arc<Issuer>);

impl OwnAnswers {
    fn begin(issuer: &Arc<Issuer>) -> OwnAnswers {
        if let Some(answers) = &issuer.answers {
            answers.set_own(true);
        }
        OwnAnswers(Arc::clone(issuer))
    }
}

impl Drop for OwnAnswers {
    fn drop(&mut self) {
        if let Some(answers) = &self.0.answers {
            answers.set_own(false);
        }
    }
}

/// Schedule of one certificate. Times are seconds since 1970.
struct Task {
    certificate: Arc<ManagedCertificate>,
    failures: u32,
    /// Earliest time of the next action.
    not_before: u64,
    /// `true` if the issuer has asked to wait until `not_before`.
    is_asked_to_wait: bool,
    /// Time of renewal.
    renew_at: u64,
    /// The issuer's window for the renewal, if it gives one.
    window: Option<(u64, u64)>,
    /// Time of the next query of renewal information; never, if the issuer has none.
    ask_at: u64,
}

impl Task {
    fn begin(certificate: Arc<ManagedCertificate>, current: &Current) -> Task {
        let renew_at = if current.is_issued() { renewal_time(current, random_u64()) } else { 0 };
        let ask_at = if current.is_issued() { 0 } else { u64::MAX };
        Task { certificate, failures: 0, not_before: 0, is_asked_to_wait: false, renew_at, window: None, ask_at }
    }

    fn is_issued(&self) -> bool {
        self.certificate.current().is_some_and(|current| current.is_issued())
    }

    fn next(&self) -> u64 {
        self.renew_at.min(self.ask_at).max(self.not_before)
    }

    /// Ends the pause after a failure, because a new configuration may have mended it.
    fn look_again(&mut self) {
        if !self.is_asked_to_wait {
            (self.failures, self.not_before) = (0, 0);
        }
        if self.window.is_none() && self.ask_at != u64::MAX {
            self.ask_at = 0;
        }
    }

    async fn act(&mut self, context: &Context<AcmeService>, account: &RefCell<Option<Rc<Account>>>) {
        let issuer = Arc::clone(&context.settings().issuer);
        let done = match account_of(context, &issuer, account).await {
            Ok(account) => {
                let client = AcmeClient::new(context, &issuer, name_servers(context), &account);
                self.act_with(context, &client).await
            }
            Err(error) => Err(error),
        };
        let now = wall_seconds();
        match done {
            Ok(()) => (self.failures, self.is_asked_to_wait) = (0, false),
            Err(error) => {
                let pause = pause_after(self.failures, &error, random_u64());
                self.failures += 1;
                self.is_asked_to_wait = error.retry_after().is_some();
                self.not_before = now + pause;
                let names = names(&self.certificate);
                let message = format_args!("certificate for \"{names}\": {error}; next try in {pause} s");
                context.log(Level::Error, message);
            }
        }
    }

    async fn act_with(&mut self, context: &Context<AcmeService>, client: &AcmeClient) -> Result<(), AcmeError> {
        let now = wall_seconds();
        if let Some(current) = self.certificate.current().filter(|current| current.is_issued() && self.ask_at <= now) {
            self.ask(context, client, &current).await;
        }
        if self.renew_at > now {
            return Ok(());
        }
        let is_renewal = self.is_issued();
        if order::register(client).await? {
            save_account(context, client).await;
        }
        let (current, written) = order::obtain(client, &self.certificate).await?;
        if let Err(error) = written {
            let message = format_args!("the certificate cannot be saved: {}", OsErrorText(&error));
            context.log(Level::Error, message);
        }
        let what = if is_renewal { "renewed" } else { "issued" };
        let (names, until) = (names(&self.certificate), date(current.not_after));
        context.log(Level::Notice, format_args!("certificate for \"{names}\" {what}, valid until {until}"));
        let now = wall_seconds();
        self.window = None;
        self.renew_at = renewal_time(&current, random_u64());
        self.ask_at = now;
        // The window of each new certificate may be over already; the pause keeps the issuer from being asked all the
        // time.
        self.not_before = now + INFO_PAUSE_MIN;
        Ok(())
    }

    /// Queries the suggested time of renewal. An issuer that gives none is not a failure.
    async fn ask(&mut self, context: &Context<AcmeService>, client: &AcmeClient, current: &Current) {
        let now = wall_seconds();
        match order::renewal_info(client, current).await {
            Ok(None) => self.ask_at = u64::MAX,
            Ok(Some((window, pause))) => {
                // The random moment is drawn once per window; drawing it again at each query would favour early ones.
                if self.window != Some(window) {
                    self.window = Some(window);
                    let latest = current.not_after.saturating_sub((current.not_after - current.not_before) / 20);
                    self.renew_at = moment_in(window, random_u64()).min(latest);
                }
                let pause = pause.map_or(INFO_PAUSE, |pause| pause.as_secs());
                self.ask_at = now + pause.clamp(INFO_PAUSE_MIN, INFO_PAUSE_MAX);
            }
            Err(error) => {
                let message = format_args!("no renewal information for \"{}\": {error}", names(&self.certificate));
                context.log(Level::Info, message);
                self.ask_at = now + INFO_PAUSE;
            }
        }
    }
}

fn moment_in((start, end): (u64, u64), random: u64) -> u64 {
    start + random % (end - start).max(1)
}

/// Returns the time of renewal for an issuer that suggests none.
fn renewal_time(current: &Current, random: u64) -> u64 {
    default_renewal(current.not_before, current.not_after, random)
}

fn default_renewal(not_before: u64, not_after: u64, random: u64) -> u64 {
    let lifetime = not_after.saturating_sub(not_before);
    let middle = if lifetime > SHORT_LIVED { lifetime / 3 * 2 } else { lifetime / 2 };
    // The jitter spreads the renewals of certificates that were obtained together.
    let jitter = lifetime / 50;
    not_before + moment_in((middle - jitter.min(middle), middle + jitter), random)
}

/// Returns the pause before the next try after this many earlier failures, in seconds.
fn pause_after(failures: u32, error: &AcmeError, random: u64) -> u64 {
    let pause = match error.is_lasting() {
        true => PAUSE_MAX,
        false => PAUSE_MIN.saturating_mul(1 << failures.min(20)).min(PAUSE_MAX),
    };
    let pause = pause - pause / 10 + random % (pause / 5).max(1);
    let wanted = error.retry_after().map_or(0, |wanted| wanted.as_secs().min(RETRY_AFTER_MAX) + 1);
    // The issuer's wish counts even if it is shorter: it knows why it refused.
    if wanted > 0 { wanted } else { pause }
}

/// Returns the account: its key comes from the configured file, from the state directory, or is generated.
async fn account_of(
    context: &Context<AcmeService>,
    issuer: &Arc<Issuer>,
    known: &RefCell<Option<Rc<Account>>>,
) -> Result<Rc<Account>, AcmeError> {
    if let Some(account) = &*known.borrow() {
        return Ok(Rc::clone(account));
    }
    let (own, share) = (Arc::clone(issuer), context.lock_share());
    let open = move || {
        let _share = share;
        open_account(&own)
    };
    let opened = default_pool().run(open).await.map_err(|error| AcmeError::Local(error.to_string()))?;
    let (key, url) = opened.map_err(AcmeError::Local)?;
    let account = Rc::new(Account { key: Arc::new(key), url: RefCell::new(url) });
    known.replace(Some(Rc::clone(&account)));
    Ok(account)
}

fn open_account(issuer: &Issuer) -> Result<(AccountKey, Option<String>), String> {
    if let Some(answers) = &issuer.answers {
        answers.clear().map_err(|error| format!("the state directory cannot be used {}", OsErrorText(&error)))?;
    }
    let directory = issuer.state_path.as_deref();
    let key = match (&issuer.account_key, directory) {
        (AccountKeySource::File(file), _) => AccountKey::of_pem(file.get().map_or(&[][..], |file| file))?,
        (AccountKeySource::Made(kind), None) => AccountKey::of_pem(keys::generate_key(*kind)?.as_bytes())?,
        (AccountKeySource::Made(kind), Some(directory)) => {
            let path = directory.join("account.key");
            let cannot = |what: &str, error| format!("\"{}\" cannot be {what} {}", path.display(), OsErrorText(&error));
            match std::fs::read(&path) {
                Ok(text) => AccountKey::of_pem(&text).map_err(|why| format!("{why} in \"{}\"", path.display()))?,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    let text = keys::generate_key(*kind)?;
                    write_atomically(&path, text.as_bytes()).map_err(|error| cannot("written", error))?;
                    AccountKey::of_pem(text.as_bytes())?
                }
                Err(error) => return Err(cannot("read", error)),
            }
        }
    };
    let saved = directory.and_then(|directory| std::fs::read(directory.join("account.json")).ok());
    let saved: Option<Value> = saved.and_then(|text| serde_json::from_slice(&text).ok());
    let is_same =
        |saved: &Value| saved["uri"] == json!(issuer.uri.to_string()) && saved["key"] == json!(key.thumbprint());
    let url = saved.filter(is_same).and_then(|saved| saved["account"].as_str().map(str::to_owned));
    Ok((key, url))
}

/// Writes the account's URL to the state directory. Without it the issuer finds the account by its key.
async fn save_account(context: &Context<AcmeService>, client: &AcmeClient) {
    let (issuer, account) = (client.issuer(), client.account());
    let Some(directory) = issuer.state_path.clone() else { return };
    let url = account.url.borrow().clone();
    let saved = json!({ "uri": issuer.uri.to_string(), "key": account.key.thumbprint(), "account": url });
    let share = client.lock_share();
    let write = move || {
        let _share = share;
        write_atomically(&directory.join("account.json"), saved.to_string().as_bytes())
    };
    if let Ok(Err(error)) = default_pool().run(write).await {
        context.log(Level::Error, format_args!("the account cannot be saved {}", OsErrorText(&error)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::acme::messages::Problem;

    const DAY: u64 = 86_400;

    fn problem(kind: &str, retry_after: Option<u64>) -> AcmeError {
        let problem = Problem { kind: format!("urn:ietf:params:acme:error:{kind}"), detail: String::new() };
        AcmeError::Problem { problem, status: 429, retry_after: retry_after.map(Duration::from_secs) }
    }

    #[test]
    fn renewals_are_spread_about_two_thirds_of_a_lifetime() {
        for (days, middle) in [(90, 60 * DAY), (6, 3 * DAY)] {
            for random in [0, 1, 12345, u64::MAX] {
                let time = default_renewal(1000, 1000 + days * DAY, random);
                let (earliest, latest) = (1000 + middle - days * DAY / 50, 1000 + middle + days * DAY / 50);
                assert!((earliest..=latest).contains(&time), "{days} {random}");
            }
        }
        assert_eq!(default_renewal(5, 5, 7), 5);
        assert_eq!(default_renewal(5, 0, 7), 5);
    }

    #[test]
    fn pauses_grow_and_the_issuer_s_word_counts() {
        let error = || problem("serverInternal", None);
        let about = |seconds: u64| seconds - seconds / 10..=seconds + seconds / 10;
        for (failures, seconds) in [(0, 60), (1, 120), (5, 1920), (11, DAY), (u32::MAX, DAY)] {
            for random in [0, 77, u64::MAX] {
                assert!(about(seconds).contains(&pause_after(failures, &error(), random)), "{failures}");
            }
        }
        assert_eq!(pause_after(0, &problem("rateLimited", Some(7200)), 0), 7201);
        assert_eq!(pause_after(9, &problem("rateLimited", Some(1)), 0), 2);
        assert_eq!(pause_after(0, &problem("rateLimited", Some(u64::MAX)), 0), RETRY_AFTER_MAX + 1);
        assert!(about(DAY).contains(&pause_after(0, &problem("rejectedIdentifier", None), 5)));
    }
}
