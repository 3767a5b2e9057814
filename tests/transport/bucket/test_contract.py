"""The promises of link.py hold in a bucket: the tests are those of gRPC, over these two ends."""

from tests.transport import test_hosts, test_links, test_subscribers

PROMISES = (
    test_links.test_every_message_goes_both_ways,
    test_links.test_order_within_a_lane_and_two_learners_apart,
    test_links.test_what_can_never_be_sent_is_the_callers_error_and_the_session_lives,
    test_links.test_stranger_is_refused_with_the_reason,
    test_links.test_newer_incarnation_replaces_the_older_and_the_stale_one_is_refused,
    test_links.test_same_incarnation_may_reconnect,
    test_links.test_learner_that_closes_is_noticed_once_after_its_last_words,
    test_links.test_syncer_that_closes_is_noticed_once_after_its_last_words,
    test_links.test_learner_that_does_not_read_is_cut_and_the_others_live,
    test_links.test_syncer_that_does_not_read_makes_send_raise_instead_of_block,
    test_links.test_bulk_that_nobody_reads_does_not_hold_up_control,
    test_links.test_closed_listener_takes_nobody,
    test_links.test_traffic_counts_what_moved,
    test_links.test_wake_ends_a_wait,
    test_hosts.test_values_of_all_hosts_are_one_and_answers_go_to_the_leader,
    test_hosts.test_host_may_come_before_its_leader,
    test_hosts.test_host_without_a_leader_is_turned_away_and_may_try_again,
    test_hosts.test_newer_session_of_the_leader_ends_the_hosts_of_the_older_one,
    test_hosts.test_each_host_gets_its_blocks_of_a_version_over_its_own_session,
    test_hosts.test_the_anchor_of_all_hosts_is_one,
    test_hosts.test_dialler_connects_every_host,
    test_subscribers.test_a_subscriber_with_the_name_of_a_learner_leaves_it_alone,
    test_subscribers.test_a_subscriber_can_send_nothing_but_requests,
    test_subscribers.test_more_subscribers_than_the_limit_are_refused,
    test_subscribers.test_a_slow_subscriber_is_cut_when_its_queue_is_full,
    test_subscribers.test_a_subscriber_that_requests_values_and_does_not_read_them_is_cut,
)
globals().update({promise.__name__: promise for promise in PROMISES})
