//! Obtains a certificate: account, order, challenges, request, chain (RFC 8555, section 7).
//!
//! ```text
//!   account ─► order ─► for each name: response to a challenge ─► ready ─► signing request with a new key ─► chain
//! ```
//!
//! Every wait is bounded. If the future is dropped, the responses to challenges are removed; the issuer lets the order
//! expire.

use std::sync::Arc;
use std::time::Duration;

use gale_runtime::{default_pool, now, sleep};
use gale_tls::Certificate;
use gale_tls::keys;
use gale_tls::managed::{Current, ManagedCertificate};
use serde_json::{Value, json};

use super::challenge::{Guard, Question};
use super::client::{AcmeClient, AcmeError, Reply};
use super::messages::{Account, Authorization, OfferedChallenge, Order, RenewalInfo, State, time};

/// Maximum time for the issuer to validate all names, and to issue a certificate.
const DECISION_TIME_MAX: Duration = Duration::from_secs(300);

/// Pause before the first poll of a state; doubled each time.
const POLL_PAUSE_MIN: Duration = Duration::from_millis(250);

/// Maximum pause, even if the issuer asks for a longer one.
const POLL_PAUSE_MAX: Duration = Duration::from_secs(30);

/// Maximum number of names in a certificate: more than any issuer allows.
const AUTHORIZATIONS_MAX: usize = 1000;

/// Maximum number of alternate chains that are searched for the preferred one.
const ALTERNATES_MAX: usize = 8;

/// Registers the account, or finds it by its key. Returns `true` if the issuer was asked, so that the account's URL is
/// new here and has to be saved; `false` if it was known already.
pub(super) async fn register(client: &AcmeClient) -> Result<bool, AcmeError> {
    if client.account().url.borrow().is_some() {
        return Ok(false);
    }
    let (issuer, directory) = (client.issuer(), client.directory().await?);
    if let Some(terms) = directory.meta.terms_of_service.as_ref().filter(|_| !issuer.accepts_terms) {
        let terms = super::messages::clean(terms);
        let message = format!("the issuer has terms of service, {terms}: accept them with \"accept_terms_of_service\"");
        return Err(AcmeError::Configuration(message));
    }
    if directory.meta.external_account_required && issuer.external_account.is_none() {
        let message = "the issuer requires an external account: set it with \"external_account_key\"";
        return Err(AcmeError::Configuration(message.to_owned()));
    }
    let mut payload = json!({});
    if issuer.accepts_terms {
        payload["termsOfServiceAgreed"] = json!(true);
    }
    if !issuer.contacts.is_empty() {
        payload["contact"] = json!(issuer.contacts);
    }
    if let Some(external) = &issuer.external_account {
        let bound = client.account().key.bind(&external.kid, external.key()?.as_slice(), &directory.new_account);
        payload["externalAccountBinding"] = bound.map_err(AcmeError::Local)?;
    }
    let reply = client.post(&directory.new_account, Some(payload)).await?;
    let account: Account = reply.json()?;
    if account.status != State::Valid {
        return Err(AcmeError::NotAuthorized(format!("the account is {:?}", account.status).to_lowercase()));
    }
    client.account().url.replace(Some(reply.location()?));
    Ok(true)
}

/// Obtains a certificate, which is served to clients from then on. Also returns whether it could be written to disk.
pub(super) async fn obtain(
    client: &AcmeClient,
    certificate: &Arc<ManagedCertificate>,
) -> Result<(Arc<Current>, std::io::Result<()>), AcmeError> {
    let replaced = certificate.current().filter(|current| current.is_issued() && !current.renewal_id.is_empty());
    let replaced = replaced.map(|current| current.renewal_id.clone());
    let (order_url, order) = match new_order(client, certificate, replaced.as_deref()).await {
        // The issuer has forgotten the account (RFC 8555, section 7.3.1).
        Err(error) if error.problem_kind() == "accountDoesNotExist" => {
            client.account().url.replace(None);
            register(client).await?;
            new_order(client, certificate, replaced.as_deref()).await?
        }
        // The certificate was replaced before, or the issuer does not know it (RFC 9773, section 5).
        Err(error)
            if replaced.is_some() && matches!(error.problem_kind(), "alreadyReplaced" | "malformed" | "conflict") =>
        {
            new_order(client, certificate, None).await?
        }
        order => order?,
    };
    let guards = authorize(client, &order).await?;
    let order =
        poll(client, &order_url, "to process the order", |order: &Order| !matches!(order.status, State::Pending))
            .await?;
    drop(guards);
    let key = in_pool({
        let kind = certificate.wanted().key;
        move || keys::generate_key(kind)
    })
    .await?;
    let order = match order.status {
        State::Ready => finalize(client, certificate, &order_url, &order, &key).await?,
        // The order is valid already, with another key.
        _ => order,
    };
    let chain_url = match (order.status, &order.certificate) {
        (State::Valid, Some(url)) => url,
        _ => {
            let why =
                order.error.as_ref().map_or_else(|| format!("the order is {:?}", order.status), |why| why.describe());
            return Err(AcmeError::NotAuthorized(why));
        }
    };
    let chain = chain(client, chain_url).await?;
    let (own, share) = (Arc::clone(certificate), client.lock_share());
    let set = move || {
        let _share = share;
        own.set(&chain, &key)
    };
    in_pool(set).await.map_err(|error| match error {
        AcmeError::Local(why) => AcmeError::Malformed(why),
        error => error,
    })
}

async fn new_order(
    client: &AcmeClient,
    certificate: &ManagedCertificate,
    replaced: Option<&str>,
) -> Result<(String, Order), AcmeError> {
    let directory = client.directory().await?;
    let identifier = |name: &String| {
        let kind = if name.parse::<std::net::IpAddr>().is_ok() { "ip" } else { "dns" };
        json!({ "type": kind, "value": name })
    };
    let identifiers: Vec<Value> = certificate.wanted().names.iter().map(identifier).collect();
    let mut payload = json!({ "identifiers": identifiers });
    if let Some((profile, is_required)) = &client.issuer().profile {
        match (directory.meta.profiles.contains_key(profile), is_required) {
            (true, _) => payload["profile"] = json!(profile),
            (false, false) => {}
            (false, true) => {
                return Err(AcmeError::Configuration(format!("the issuer has no profile \"{profile}\"")));
            }
        }
    }
    if let Some(replaced) = replaced.filter(|_| directory.renewal_info.is_some()) {
        payload["replaces"] = json!(replaced);
    }
    let reply = client.post(&directory.new_order, Some(payload)).await?;
    let order: Order = reply.json()?;
    if order.authorizations.len() > AUTHORIZATIONS_MAX {
        return Err(AcmeError::malformed("too many authorizations"));
    }
    Ok((reply.location()?, order))
}

/// Responds to the challenges of an order and waits for the issuer's validation. The responses stay in place as long as
/// the returned guards live, since the issuer may validate again.
async fn authorize(client: &AcmeClient, order: &Order) -> Result<Vec<Guard>, AcmeError> {
    let challenge = client.issuer().challenge;
    let (mut guards, mut waiting) = (Vec::new(), Vec::new());
    for url in &order.authorizations {
        let authorization: Authorization = client.fetch(url).await?.json()?;
        match authorization.status {
            State::Valid => continue,
            State::Pending => {}
            status => return Err(not_authorized(&authorization, challenge.kind(), status)),
        }
        let name = authorization.identifier.value.to_ascii_lowercase();
        let offered = authorization.challenges.iter().find(|offered| offered.kind == challenge.kind());
        let Some(offered) = offered else {
            let message = format!("the issuer offers no challenge \"{}\" for \"{name}\"", challenge.kind());
            return Err(AcmeError::Configuration(super::messages::clean(&message)));
        };
        let key_authorization = format!("{}.{}", offered.token, client.account().key.thumbprint());
        let question = Question { name, token: offered.token.clone(), key_authorization };
        let presented = challenge.present(question, client.issuer().answers.clone()).await;
        guards.push(presented.map_err(AcmeError::Local)?);
        waiting.push((url, offered.clone()));
    }
    for (_, offered) in &waiting {
        if offered.status == State::Pending {
            client.post(&offered.url, Some(json!({}))).await?;
        }
    }
    for (url, _) in waiting {
        let is_decided = |authorization: &Authorization| authorization.status != State::Pending;
        let authorization = poll(client, url, "to validate a name", is_decided).await?;
        if authorization.status != State::Valid {
            return Err(not_authorized(&authorization, challenge.kind(), authorization.status));
        }
    }
    Ok(guards)
}

fn not_authorized(authorization: &Authorization, kind: &str, status: State) -> AcmeError {
    let name = &authorization.identifier.value;
    let is_failed = |offered: &&OfferedChallenge| offered.kind == kind && offered.error.is_some();
    let error = authorization.challenges.iter().find(is_failed).and_then(|offered| offered.error.as_ref());
    let why = error.map_or_else(|| format!("{status:?}").to_lowercase(), |error| error.describe());
    AcmeError::NotAuthorized(super::messages::clean(&format!("{kind} for \"{name}\": {why}")))
}

/// Sends the certificate signing request and waits for the certificate.
async fn finalize(
    client: &AcmeClient,
    certificate: &Arc<ManagedCertificate>,
    order_url: &str,
    order: &Order,
    key: &str,
) -> Result<Order, AcmeError> {
    let (wanted, key) = (certificate.wanted().clone(), key.to_owned());
    let has_common_name = client.issuer().has_common_name;
    let request = in_pool(move || keys::certificate_request(&wanted.names, &key, has_common_name)).await?;
    let payload = json!({ "csr": gale_tls::base64_url(&request) });
    let order: Order = client.post(&order.finalize, Some(payload)).await?.json()?;
    match order.status {
        State::Processing | State::Ready | State::Pending => {
            poll(client, order_url, "to issue the certificate", |order: &Order| {
                !matches!(order.status, State::Processing | State::Ready | State::Pending)
            })
            .await
        }
        _ => Ok(order),
    }
}

/// Returns the certificate chain: the preferred one among the alternates if there is one, else the default.
async fn chain(client: &AcmeClient, url: &str) -> Result<Vec<u8>, AcmeError> {
    let first = client.fetch(url).await?;
    let Some(preferred) = &client.issuer().preferred_chain else { return Ok(first.body) };
    if is_issued_by(&first, preferred) {
        return Ok(first.body);
    }
    let alternates: Vec<String> = first.fields("Link").flat_map(alternates).take(ALTERNATES_MAX).collect();
    for url in alternates {
        let other = client.fetch(&url).await?;
        if is_issued_by(&other, preferred) {
            return Ok(other.body);
        }
    }
    Ok(first.body)
}

/// Returns the URLs of alternate chains in a `Link` field (RFC 8288).
fn alternates(field: &str) -> impl Iterator<Item = String> {
    let link = |part: &str| {
        let (url, parameters) = part.trim().strip_prefix('<')?.split_once('>')?;
        let is_alternate = |parameter: &str| {
            matches!(parameter.trim().split_once('='), Some((name, value))
                if name.eq_ignore_ascii_case("rel") && value.trim_matches('"').eq_ignore_ascii_case("alternate"))
        };
        parameters.split(';').any(is_alternate).then(|| url.to_owned())
    };
    field.split(',').filter_map(link).collect::<Vec<_>>().into_iter()
}

/// Returns `true` if the issuer of the topmost certificate has this name.
fn is_issued_by(reply: &Reply, name: &str) -> bool {
    Certificate::last_of_pem(&reply.body, |last| last.issuer_common_name().as_deref() == Some(name)) == Some(true)
}

/// Returns the suggested window of renewal and the time of the next query, or `None` if the issuer gives none.
pub(super) async fn renewal_info(
    client: &AcmeClient,
    current: &Current,
) -> Result<Option<((u64, u64), Option<Duration>)>, AcmeError> {
    let directory = client.directory().await?;
    let Some(url) = directory.renewal_info.as_ref().filter(|_| !current.renewal_id.is_empty()) else {
        return Ok(None);
    };
    let reply = client.get(&client.parse(url)?.with_segment(&current.renewal_id)).await?;
    let info: RenewalInfo = reply.json()?;
    match (time(&info.suggested_window.start), time(&info.suggested_window.end)) {
        (Some(start), Some(end)) if start < end => Ok(Some(((start, end), reply.retry_after()))),
        _ => Err(AcmeError::malformed("no window for the renewal")),
    }
}

/// Polls a resource until it is in the wanted state.
async fn poll<T: serde::de::DeserializeOwned>(
    client: &AcmeClient,
    url: &str,
    what: &'static str,
    is_wanted: impl Fn(&T) -> bool,
) -> Result<T, AcmeError> {
    let began = now();
    let mut pause = POLL_PAUSE_MIN;
    loop {
        let reply = client.fetch(url).await?;
        let resource = reply.json()?;
        if is_wanted(&resource) {
            return Ok(resource);
        }
        if now().since(began) > DECISION_TIME_MAX {
            return Err(AcmeError::TimedOut(what));
        }
        sleep(reply.retry_after().unwrap_or(pause).clamp(POLL_PAUSE_MIN, POLL_PAUSE_MAX)).await;
        pause = (pause * 2).min(POLL_PAUSE_MAX);
    }
}

/// Runs a long task in a thread pool.
async fn in_pool<T: Send + 'static>(task: impl FnOnce() -> Result<T, String> + Send + 'static) -> Result<T, AcmeError> {
    let done = default_pool().run(task).await.map_err(|error| AcmeError::Local(error.to_string()))?;
    done.map_err(AcmeError::Local)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_other_chains_are_found() {
        let field =
            r#"<https://a/1>;rel="alternate", <https://a/d>;rel="index", <https://a/2>; title=x; REL=alternate"#;
        assert_eq!(alternates(field).collect::<Vec<_>>(), ["https://a/1", "https://a/2"]);
        assert_eq!(alternates("nothing, <open; rel=alternate").count(), 0);
    }
}
